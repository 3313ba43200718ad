"""Measure machines and observed steps."""
