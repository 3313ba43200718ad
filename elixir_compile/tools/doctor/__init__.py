"""Find faults of this machine that make training fail or slow, each with a line that repairs it.

    this_system()   facts about this process, its torch, its accelerator and its disk    (loads torch if it is there)
    diagnose()      facts and files of the system to findings, each with a verdict

No module of this package imports torch before `this_system` does, so a machine without torch gets a diagnosis too.
"""

from elixir_compile.tools.doctor.checks import CHECKS, diagnose
from elixir_compile.tools.doctor.facts import Diagnosis, System, Verdict, this_system

__all__ = ["CHECKS", "Diagnosis", "System", "Verdict", "diagnose", "this_system"]
