"""Cut a captured step into the stages of a pipeline, and choose how each runs within the memory of its rank."""
