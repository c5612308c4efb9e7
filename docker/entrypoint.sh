#!/usr/bin/env bash
# Starts what the container is for: `xllm-npu ARGUMENTS`, or any other program that is named first (bash, npu-smi).
# Before that: CANN's environment, where there is CANN, and a home for users that the image does not know.
set -eo pipefail # not -u: CANN's scripts read variables that may not be set

ascend=${ASCEND_ROOT:-/usr/local/Ascend}

source_first() { # the first of these scripts that is there; in a function, so that it does not see our arguments
    local script=""
    for script in "$@"; do
        if [ -r "$script" ]; then
            set --
            # shellcheck source=/dev/null
            source "$script" || echo "$script failed with status $?" >&2
            return
        fi
    done
}

add_library_path() { # behind what is there already: CANN's own come first
    case ":${LD_LIBRARY_PATH:-}:" in
        *":$1:"*) ;;
        *) if [ -d "$1" ]; then export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$1"; fi ;;
    esac
}

if [ -z "${ASCEND_OPP_PATH:-}" ]; then
    source_first "$ascend/cann/set_env.sh" "$ascend/ascend-toolkit/set_env.sh" "$ascend"/cann-*/set_env.sh
fi
for folder in lib64 lib64/common lib64/driver; do
    add_library_path "$ascend/driver/$folder"
done

# docker run --user NUMBER: no name and no home, which torch's caches ask for.
if [ ! -w "${HOME:-/}" ]; then
    export HOME="${TMPDIR:-/tmp}/xllm-npu-home-$(id -u)"
    mkdir -p "$HOME"
fi
export USER="${USER:-$(id -un 2>/dev/null || id -u)}"

if [ "$#" -gt 0 ] && [ -n "$(type -P -- "$1")" ]; then
    exec "$@"
fi
exec xllm-npu "$@"
