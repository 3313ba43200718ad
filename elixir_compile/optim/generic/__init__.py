"""Any optimizer class in one host pass: its state, its recorded step, and the C code made of it."""
