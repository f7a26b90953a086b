#!/usr/bin/env bash
# Everything that needs a GPU, in one command and less than 10 minutes after the downloads.
#
#   bash scripts/gpu_check.sh [--rehearse] [--quick] [--parts LIST] [--out DIR]
#
#   --rehearse   the same without a GPU, on the CPU: shows that every part runs, proves nothing of a GPU
#   --quick      fewer shapes in the benchmark
#   --parts      some of: environment setup rivals device tests benchmark memcheck racecheck initcheck synccheck
#   --out        folder for a log of each part, summary.txt, summary.json, benchmark; default out/gpu_check
#
# A part that fails does not stop the others. Exit status: 0 every part passed, 1 one failed, 2 a wrong
# option, 3 there is no GPU (a rehearsal is run, and only --rehearse makes that a success).
# SANTA_PYTHON names the interpreter; else it is .venv, or build/cuda-venv where .venv's torch has no CUDA.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

every=(environment setup rivals device tests benchmark memcheck racecheck initcheck synccheck)
started_in=$PWD
cd "$root"

usage() { sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' scripts/gpu_check.sh; }
wrong() {
    echo "error: $1 (bash scripts/gpu_check.sh --help)" >&2
    exit 2
}

rehearse=false quick=() parts=("${every[@]}") out=$root/out/gpu_check
while [ $# -gt 0 ]; do
    case "$1" in
    --rehearse) rehearse=true ;;
    --quick) quick=(--quick) ;;
    --parts | --out)
        [ $# -gt 1 ] || wrong "$1 needs a value"
        if [ "$1" = --parts ]; then IFS=', ' read -ra parts <<<"$2"; else out=$2; fi
        shift
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) wrong "no such option: $1" ;;
    esac
    shift
done
for part in "${parts[@]}"; do
    [[ " ${every[*]} " == *" $part "* ]] || wrong "--parts: no such part: $part; there are ${every[*]}"
done
[ ${#parts[@]} != 0 ] || wrong "--parts: none given"
[[ $out == /* ]] || out=$started_in/$out
mkdir -p "$out" && touch "$out/summary.txt" || wrong "--out: $out cannot be written to"

gpu=true
if $rehearse || ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then gpu=false; fi
has_cuda() { "$1" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; }
if $gpu && [ -z "${SANTA_PYTHON:-}" ] && ! has_cuda "$python"; then
    python=$root/build/cuda-venv/bin/python
fi

say() { printf '%s\n' "$*" | tee -a "$out/summary.txt"; }
: >"$out/summary.txt"
if $gpu; then
    say "GPU check of $(date -u +%Y-%m-%dT%H:%MZ): $(nvidia-smi -L | head -n 1)"
else
    $rehearse || say "NO GPU: nvidia-smi finds none. What follows is a rehearsal, and the check has not been done."
    say "REHEARSAL on the CPU: it shows that the parts run, and proves nothing of a GPU."
    export CUDA_VISIBLE_DEVICES=
fi

# The clock starts when everything is downloaded.
deadline=$((SECONDS + 3600)) failures=0 records=() running=
trap '[ -z "$running" ] || kill "$running" 2>/dev/null; exit 130' INT TERM

# part NAME SECONDS COMMAND...: run it where it was asked for, keep its output, and go on.
part() {
    local name=$1 limit=$2 began=$SECONDS status=passed code=0
    shift 2
    [[ " ${parts[*]} " == *" $name "* ]] || return 0
    [ $limit -le $((deadline - SECONDS)) ] || limit=$((deadline - SECONDS))
    if [ $limit -le 0 ]; then
        echo "no time was left for this part" >"$out/$name.log"
        code=124
    else
        timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null &
        running=$!
        wait "$running" || code=$?
        running=
    fi
    if [ $code = 124 ] || [ $code = 137 ]; then
        status="timed out"
    elif [ $code != 0 ]; then
        status=failed
    elif ! $gpu; then
        status=rehearsed
    fi
    local seconds=$((SECONDS - began))
    say "$(printf '%-12s %-10s %4d s   %s' "$name" "$status" $seconds "$(tail -n 1 "$out/$name.log" | cut -c 1-90)")"
    records+=("{\"part\": \"$name\", \"status\": \"$status\", \"exit\": $code, \"seconds\": $seconds}")
    [ $code = 0 ] || failures=$((failures + 1))
}

if $gpu && [[ $python == "$root"/build/* ]]; then
    part environment 1800 bash scripts/cuda_environment.sh
    export SANTA_PYTHON=$python
else
    part environment 60 "$python" -c 'import torch; print(torch.__version__, "CUDA", torch.version.cuda)'
fi
# .venv may be new: the interpreter that follows is the one that setup has made.
settings=()
if $gpu; then
    archs=$("$python" -c '
import torch
found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
print(";".join(sorted({f"{major}.{minor}" for major, minor in found})))' 2>/dev/null) || archs=
    settings=(FORCE_CUDA=1)
    [ -z "$archs" ] || settings+=("TORCH_CUDA_ARCH_LIST=$archs")
fi
part setup 1800 env "${settings[@]}" bash scripts/setup.sh test
if $gpu; then
    # Nothing else than these rivals may change: a rival that pip cannot have is a part that failed. Some compile
    # their kernels when they are first asked, which the list does; that is none of the benchmark's time.
    part rivals 900 env "${settings[@]}" \
        bash -c 'bash scripts/setup.sh gpu && "$0" benchmarks/cuda_decode.py --list' "$python"
else
    part rivals 60 "$python" benchmarks/cuda_decode.py --list
fi
deadline=$((SECONDS + 570))

if $gpu; then
    part device 30 bash -c 'nvidia-smi && "$0" -m santa_torch info && "$0" -m santa_torch plan --device this &&
        "$0" -c "import torch; torch.zeros(1).cuda(); print(torch.cuda.get_device_name())"' "$python"
    part tests 210 env SANTA_REQUIRE_GPU=1 "$python" -m pytest -q -p no:cacheprovider \
        -k "(gpu or test_cuda_device) and not gpu_check" tests # ids of what runs on the GPU hold "gpu"
else
    part device 30 bash -c '"$0" -m santa_torch info && "$0" -m santa_torch plan --device h100' "$python"
    part tests 210 "$python" -m pytest -q -p no:cacheprovider tests/test_cuda_device.py
fi

if $gpu; then
    part benchmark 150 "$python" benchmarks/cuda_decode.py "${quick[@]}" --out "$out/benchmark"
else
    part benchmark 120 "$python" benchmarks/cuda_decode.py --rehearse "${quick[@]}" --out "$out/benchmark"
fi

sanitizer=
for candidate in compute-sanitizer "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer"; do
    sanitizer=$(command -v "$candidate") && break
done
# sanitize TOOL OPTIONS...
sanitize() {
    local tool=$1
    shift
    if ! $gpu; then
        part "$tool" 60 "$python" tests/sanitizer_steps.py --device cpu
    elif [ -z "$sanitizer" ]; then
        part "$tool" 60 bash -c 'echo "compute-sanitizer is neither on the path nor in CUDA_HOME/bin"; exit 1'
    else
        # A tool that was never attached finds nothing, and neither does one whose program stopped early: both
        # closing lines have to be there.
        part "$tool" 45 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 bash -c '
            "$@" >"$0" 2>&1
            code=$?
            cat "$0"
            [ $code = 0 ] && grep -q "ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards" "$0" &&
                grep -q "operator calls on cuda: as expected" "$0"' "$out/$tool.txt" \
            "$sanitizer" --tool "$tool" --error-exitcode 9 "$@" "$python" tests/sanitizer_steps.py
    fi
}
sanitize memcheck --padding 64
sanitize racecheck --racecheck-report all
sanitize initcheck
sanitize synccheck

{
    printf '{"rehearsal": %s, "failures": %d, "parts": [\n' "$($gpu && echo false || echo true)" $failures
    last=$((${#records[@]} - 1))
    for i in "${!records[@]}"; do
        printf '  %s%s\n' "${records[$i]}" "$([ "$i" = $last ] || echo ,)"
    done
    printf ']}\n'
} >"$out/summary.json"
[ $failures = 0 ] || say "FAILED: $failures of ${#records[@]} parts; their logs are in $out"
[ $failures = 0 ] || exit 1
if $gpu; then
    say "passed; logs and results are in $out"
else
    say "rehearsed; logs are in $out"
    $rehearse || exit 3
fi
