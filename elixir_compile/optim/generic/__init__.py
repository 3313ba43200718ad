"""Any optimizer class: its state schema, its recorded step, and C code to run the step as a host pass."""
