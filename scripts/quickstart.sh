#!/usr/bin/env bash
# The whole way, once: real chats in, a draft head that vLLM serves out. Interrupt it and start it
# again as you like: the dump and the training go on where they stopped.
#   bash scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

cat <<'TEXT'
Quickstart: a draft head for SmolLM2-135M-Instruct, trained on 220 ShareGPT conversations.
  time   about 8 minutes on 2 CPU cores after the installs; less on a GPU, which is used if there is one
  disk   about 1.5 GB for the Python packages (several more with a CUDA build of torch),
         120 MB downloaded, 0.8 GB under checkpoints/demo
This is a demonstration size: real heads are trained on a thousand times as much.

TEXT

run() {
  printf '\n+ %s\n' "$*"
  "$@"
}

began=$SECONDS
setup dev
installed=$SECONDS

run python -m scripts.fetch_demo recipe=quickstart
run python -m scripts.dump_features recipe=quickstart
run python -m scripts.train_head recipe=quickstart
run python -m scripts.export_head recipe=quickstart engine=vllm
run python -m scripts.export_head recipe=quickstart engine=sglang
run python -m scripts.heldout_prompts recipe=quickstart
run python -m scripts.evaluate_head recipe=quickstart

cat <<TEXT

Done: $((installed - began)) s for the installs, $((SECONDS - installed)) s for the rest. The report is above and in
checkpoints/demo/export/vllm/evaluation (report.html is the page to open); the last line serves the head in vLLM.
On a CPU a head this small makes decoding slower, as the ratio shows: there, checking 4 tokens costs much more than one.
On a GPU checking them costs about as much as one, and acceptance is what counts.
TEXT
