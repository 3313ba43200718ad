"""What every room needs: units, errors, options, folders, JSON of dataclasses, and limits of the process."""
