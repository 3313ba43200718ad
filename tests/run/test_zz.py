import sys; sys.path.insert(0, "/tmp/pk")
import pytest
from stages_probe import body
from tests.run.processes import spawn
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
def test_x(tmp_path, name):
    for f in spawn(body, 2, name, "1GiB", "keep", folder=tmp_path, limit_s=200):
        print(name, f, "stages/run", round(f["stages"]/f["run"], 4), "run/measured", round(f["run"]/f["measured"], 4))
