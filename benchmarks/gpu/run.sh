#!/bin/sh
# What only a GPU can answer, in three calls of a few minutes each. Needs `python3` with torch and the dependencies of the
# package; nothing has to be installed.
#
#     benchmarks/gpu/run.sh lives 240 /tmp/gpu      does it train, exactly and inside of its budget? Questions beside each other
#     benchmarks/gpu/run.sh wide 240 /tmp/gpu       tests of training habits, random runs, and what the allocator holds
#     benchmarks/gpu/run.sh figures 590 /tmp/gpu    seconds and bytes of a Llama of 1.1 B parameters, one question after another
#
# The second argument is the most seconds of the call. Everything that is known so far is packed into results.tgz in the
# folder after each question, so a machine that is taken away loses one question at most. Send back that file.
# TURNS=90 asks the questions of "figures" beside each other up to their first step, which compiles for most of a minute, then
# each in its turn, 90 s before the end at the latest; ONLY="fsdp2 as_fsdp2" asks some; PEAKS="fsdp2=14526762188" is for budgets
# of a question that is asked beside them. All of their memory must fit.
# STEPS_ARGS="--tiny" checks the questions themselves, on a device without kernels or, with "--device cpu", on a CPU; PATIENCE=10
# gives each of them ten times as long. `make cuda` does both calls so.

call=$1
most_s=${2:-240}
folder=${3:-/tmp/gpu}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
results=$folder/results

mkdir -p "$results"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export ELIXIR_CACHE_DIR="${ELIXIR_CACHE_DIR:-$folder/cache}" TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$folder/inductor}"
cd "$root" || exit 1
began=$(date +%s)
steps="$python $here/steps.py ${STEPS_ARGS:-} --out $results"

pack() {
    tar czf "$folder/.results" -C "$results" . 2>/dev/null && mv "$folder/.results" "$folder/results.tgz"
}

step() { # NAME SECONDS COMMAND...
    name=$1
    limit=$(($2 * ${PATIENCE:-1}))
    shift 2
    left=$((most_s - $(date +%s) + began))
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -lt 8 ]; then
        echo "not started: $name" >>"$results/summary.txt"
        return
    fi
    from=$(date +%s)
    timeout -k 5 -s INT "$limit" "$@" >"$results/$name.log" 2>&1
    code=$?
    echo "$name: exit code $code after $(($(date +%s) - from)) s, at $((from - began)) s" >>"$results/summary.txt"
    grep -h '"ok": false' "$results/$name.jsonl" 2>/dev/null | cut -c1-300 >>"$results/summary.txt"
}

processes=
beside() { step "$@" & processes="$processes $!"; }

# A shell ignores SIGINT in what it starts with `&`; with it pytest prints where a test hangs.
pytests() { # NAME SECONDS MODULE OPTIONS...
    name=$1
    seconds=$2
    module=$3
    shift 3
    beside "$name" "$seconds" "$python" -c "import runpy, signal, sys; signal.signal(2, signal.default_int_handler); runpy.run_module(sys.argv.pop(1), run_name='__main__')" \
        "$module" "$@" --dist worksteal -W default -p no:cacheprovider -v -rfEs --tb=short --junitxml "$results/$name.xml"
}

settle() { # until all that runs beside is over
    while sleep 3; do
        pack
        alive=
        for process in $processes; do kill -0 "$process" 2>/dev/null && alive=1; done
        [ -z "$alive" ] && break
    done
    wait
}

# Lets those that are asked beside each other go on, each in its turn, once all of them have compiled, or are over.
take_turns() {
    while sleep 0.2; do
        waiting=$(ls "$results"/*.ready 2>/dev/null | wc -l)
        alive=0
        for process in $processes; do kill -0 "$process" 2>/dev/null && alive=$((alive + 1)); done
        [ "$waiting" -ge "$alive" ] && break
        [ $((most_s - $(date +%s) + began)) -lt "${TURNS:-0}" ] && break
    done
    touch "$results/go"
    settle
}

case $call in
lives)
    step facts 40 $steps facts
    pack
    beside trains 200 $steps trains --inner aot_eager
    beside compiles 220 $steps trains --inner inductor --name compiles
    beside pinning 60 $steps pinning
    beside late 150 $steps late
    beside sanitizer 90 env TORCH_CUDA_SANITIZER=1 $steps sanitizer
    pytests tests 230 pytest -m gpu ${TESTS:-tests/gpu} -n "${WORKERS:-6}"
    # shellcheck disable=SC2086
    pytests newer 230 tests.device.on_gpu --newer -n "${WORKERS:-6}" -m "slow or not slow" \
        -k "wherever_and_whenever_tensors or not slow" ${NEWER_ARGS:-}
    settle
    ;;
wide)
    # shellcheck disable=SC2086
    pytests runs 230 tests.device.on_gpu -n "${WORKERS:-4}" ${RUNS_ARGS:-}
    for first in 0 100; do
        beside "random_$first" 230 "$python" -m tests.run.random_runs --device cuda --first $first --runs "${RANDOM_RUNS:-25}"
    done
    beside random_others 230 "$python" -m tests.run.random_runs --device cuda --others --first 0 --runs "${RANDOM_RUNS:-25}"
    for model in GPT-2 Llama mixed lengths; do
        beside "held_$model" 230 "$python" -m tests.cuda_standin.fragmentation "$model" --budget tight --steps "${HELD_STEPS:-200}"
    done
    settle
    ;;
figures)
    [ -f "$results/machine.json" ] || step measure 45 $steps measure
    for peak in ${PEAKS:-}; do echo "${peak#*=}" >"$results/${peak%%=*}.peak"; done
    rm -f "$results"/*.ready "$results/go"
    pack
    while read -r name limit options; do
        [ -n "${ONLY:-}" ] && case " $ONLY " in *" $name "*) ;; *) continue ;; esac
        if [ -n "${TURNS:-}" ]; then
            # shellcheck disable=SC2086
            beside "$name" "$most_s" $steps train --turns --name "$name" $options
            continue
        fi
        # shellcheck disable=SC2086
        step "$name" "$limit" $steps train --name "$name" $options
        pack
    done <<QUESTIONS
torch 100 --backend torch
fsdp2 60 --backend fsdp2 --steps 8
as_fsdp2 180 --budget-of fsdp2
half 180 --budget-of torch --share 0.5 --trace
all 100 --budget-of torch
third 180 --budget-of torch --share 0.3
masters 75 --budget-of torch --share 0.3 --dtype bfloat16 --expandable
muon_torch 75 --backend torch --optimizer muon
muon 180 --optimizer muon --budget-of torch --share 0.33
coded_torch 75 --backend torch --model coded
coded 180 --model coded --budget-of coded_torch --share 0.3
QUESTIONS
    [ -n "${TURNS:-}" ] && take_turns
    ;;
*)
    echo "usage: $0 lives|wide|figures SECONDS FOLDER" >&2
    exit 2
    ;;
esac
pack
cp "$results/summary.txt" "$folder/" 2>/dev/null
tail -n 60 "$results/summary.txt"
grep -h '"median_s"\|"held"\|"same"' "$results"/*.jsonl 2>/dev/null | cut -c1-260
tail -qn 25 "$results/tests.log" "$results/newer.log" "$results/runs.log" "$results"/random_*.log "$results"/held_*.log 2>/dev/null
exit 0
