"""The choices of the search, levels of buckets and modes of layers, and the device and host bytes of each choice."""
