"""Import before torch: OpenMP threads that wait asleep, so that another process costs little and figures are steady."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
