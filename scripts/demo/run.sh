#!/usr/bin/env bash
# Trains and validates a model from raw text, without network: collects text that every Python installation has, trains
# a tokenizer, tokenizes the text, trains a small model on two processes and compares its loss with the unigram entropy.
# Stages whose output exists are skipped; FRESH=1 repeats all. Needs `megads` on the PATH (`make demo` sets it).
# `scripts/demo/run.sh data` stops after the dataset.
set -euo pipefail
cd "$(dirname "$0")/../.."

DATA=runs/demo-data
CORPUS=$DATA/corpus.jsonl
TOKENIZER=$DATA/tokenizer.json
DATASET=$DATA/corpus

if ! command -v megads >/dev/null; then
    echo "demo: no megads command found: run it as 'make demo', or activate the environment first" >&2
    exit 1
fi
stage() {
    echo
    echo "== $*"
}
# Outputs are written atomically, so an output that is newer than its input is complete.
have() {
    local output=$1 input=$2
    [[ -s $output && ! $input -nt $output ]]
}

run_dir=$(megads train experiment=demo run.dry_run=true | awk '$1 == "writes" { print $3 }')
if [[ ${FRESH:-0} == 1 ]]; then
    rm -rf "$DATA" "$run_dir"
fi
mkdir -p "$DATA"

stage "1/4 corpus: $CORPUS"
if [[ -s $CORPUS ]]; then echo "there already"; else python scripts/demo/collect_corpus.py --output "$CORPUS"; fi

stage "2/4 tokenizer: $TOKENIZER"
if have "$TOKENIZER" "$CORPUS"; then echo "there already"; else
    megads tokenizer input="[$CORPUS]" vocab_size=8192 output="$TOKENIZER"
fi

stage "3/4 dataset: $DATASET.bin and $DATASET.idx"
if have "$DATASET.idx" "$TOKENIZER" && [[ -s $DATASET.bin ]]; then echo "there already"; else
    megads preprocess input="[$CORPUS]" tokenizer="$TOKENIZER" output="$DATASET" overwrite=true
fi

if [[ ${1:-} == data ]]; then exit 0; fi

stage "4/4 training: $run_dir"
if python scripts/demo/verdict.py "$run_dir" --finished; then echo "there already"; else
    megads train experiment=demo
fi

stage "what was made"
ls -l "$CORPUS" "$TOKENIZER" "$DATASET.bin" "$DATASET.idx"
echo "run directory: $run_dir (config.yaml, metrics.jsonl, events.jsonl, logs/, checkpoints/)"
code=0
python scripts/demo/verdict.py "$run_dir" || code=$?
megads report run="$run_dir"

stage "what it writes after \"def \""
megads generate run="$run_dir" prompt='def ' max_new_tokens=60 temperature=0.7
exit "$code"
