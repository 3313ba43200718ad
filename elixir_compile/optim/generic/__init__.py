"""Any optimizer class: its state schema, its recorded step, and C code that runs the step as one host pass."""
