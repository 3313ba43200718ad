"""What the search may decide: where each bucket lives, what each layer saves, and the bytes that follow."""
