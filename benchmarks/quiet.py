"""Let idle OpenMP threads sleep instead of spin, so that figures beside other processes are steady.

Import it before torch.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
