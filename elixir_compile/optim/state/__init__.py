"""The optimizer's state: where it is placed, in memory or on disk, and how it is loaded."""
