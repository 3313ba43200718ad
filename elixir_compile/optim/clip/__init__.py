"""Norms and overflow of gradients, and what masters add to them."""
