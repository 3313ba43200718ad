"""What the Elixir paper measured on its machine with A100s, for n of them at once, and what Adam moves on any machine.

```text
  c2g    host to devices       16.3 n + 8.7     GB/s
  g2c    devices to host       15.8 n + 2.3     GB/s
  v_gpu  updates on devices    50 n             Gelem/s
  v_cpu  updates on the host   1.66 ln n + 5.15 Gelem/s
```

Source: Elixir (arXiv 2212.05339), section 5. The fits are for the devices of one host; no network is in them.
"""

import math
from dataclasses import dataclass

SOURCE = "Elixir (arXiv 2212.05339), measured rates"
H2D_FIT = "c2g = 16.3 n + 8.7"
D2H_FIT = "g2c = 15.8 n + 2.3"
DEVICE_UPDATE_FIT = "v_gpu = 50 n"
HOST_UPDATE_FIT = "v_cpu = 1.66 ln n + 5.15"

ADAM_BYTES_PER_ELEMENT = 28
"""Adam in float32 reads parameter, gradient and two moments and writes all but the gradient: 7 words of 4 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRates:
    """Of all devices together."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    device_update_elements_per_s: float
    host_update_elements_per_s: float


def paper_rates(num_devices: int) -> PaperRates:
    """Return the paper's fits of its measurements for `num_devices` devices together."""
    return PaperRates(
        h2d_bytes_per_s=16.3e9 * num_devices + 8.7e9,
        d2h_bytes_per_s=15.8e9 * num_devices + 2.3e9,
        device_update_elements_per_s=50e9 * num_devices,
        host_update_elements_per_s=1.66e9 * math.log(num_devices) + 5.15e9,
    )
