"""Callbacks for trainers of other libraries. Each module needs its library, which is not a dependency."""
