#!/bin/sh
# The first thirty minutes on an accelerator: each step of `first_gpu.py` in a process of its own, with a limit of time.
#
#     benchmarks/first_gpu.sh                  all steps; results in benchmarks/results/first_gpu/<step>.json, a page of
#                                              them in README.md beside them
#     benchmarks/first_gpu.sh --for 550        starts no step after 550 seconds: run it again to go on
#
# A step that has a result is not run again; remove its file to repeat it. A step that fails or takes too long leaves
# its output in <step>.log, and the next step runs. Exit code 1 if a step has no result at the end.

set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python}
results=${RESULTS:-benchmarks/results/first_gpu}
most_s=1800
[ "${1:-}" = "--for" ] && most_s=$2
mkdir -p "$results"
began=$(date +%s)
missing=0

while read -r step limit_s; do
    [ -s "$results/$step.json" ] && continue
    if [ $(($(date +%s) - began)) -ge "$most_s" ]; then
        echo "not started: $step"
        missing=1
        continue
    fi
    step_began=$(date +%s)
    if timeout "$limit_s" "$PYTHON" benchmarks/first_gpu.py "$step" --out "$results/$step.json" >"$results/$step.log" 2>&1; then
        echo "done in $(($(date +%s) - step_began)) s: $step"
        rm -f "$results/$step.log"
    else
        echo "FAILED with exit code $? after $(($(date +%s) - step_began)) s of $limit_s: $step, see $results/$step.log"
        missing=1
    fi
done <<STEPS
$("$PYTHON" benchmarks/first_gpu.py --list)
STEPS
"$PYTHON" benchmarks/first_gpu_page.py "$results" || missing=1
exit $missing
