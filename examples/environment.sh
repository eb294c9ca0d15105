# shellcheck shell=bash
# shellcheck disable=SC2154,SC2034 # root comes from the script that sources this; launcher goes to it
# Sourced by the start scripts: finds a Python that can train, makes one, counts GPUs and cores.
# They set `root`, the folder of the repository, before.

SECONDS_BETWEEN_LINES=${SECONDS_BETWEEN_LINES:-20} # of progress, where stderr is no terminal

# One line on stderr, and exit 2: a mistake that the user can mend.
refuse() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Prints what this Python lacks of the packages of pyproject.toml; fails if that is anything, or if it cannot say.
list_missing() {
    "$1" "$root/examples/packages.py" missing 2>/dev/null
}

# Prints the first Python that can train: $PYTHON if it is set, else the active environment's, the one on the PATH,
# the repository's own. Returns 1 if there is none, and says what an active environment lacks.
find_python() {
    local candidate missing
    for candidate in "${PYTHON:-${VIRTUAL_ENV:-none}/bin/python}" "${CONDA_PREFIX:-none}/bin/python" python3 python \
        "$root/.venv/bin/python"; do
        if command -v "$candidate" >/dev/null 2>&1; then
            if missing=$(list_missing "$candidate"); then
                command -v "$candidate"
                return
            elif [[ -n $missing && $candidate == "${VIRTUAL_ENV:-${CONDA_PREFIX:-none}}"/* ]]; then
                echo "the active environment is left alone: it lacks $missing" >&2
            fi
        fi
        [[ -z "${PYTHON:-}" ]] || return 1 # who names a Python wants that one
    done
    return 1
}

# Prints a Python of 3.10 or newer to make an environment with: $PYTHON, or what is on the PATH.
find_base_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
        [[ -z "${PYTHON:-}" ]] || break
    done
    refuse "${PYTHON:-python3}: no Python of 3.10 or newer here; install one, or name it: PYTHON=/path/to/python3 bash $0"
}

# show_progress FOLDER LOG: seconds, size of FOLDER and the last line of LOG, drawn anew on a terminal, else now and then a line.
# In the background, until it is killed or this script has ended.
show_progress() {
    local folder=$1 log=$2 began=$SECONDS pause=$SECONDS_BETWEEN_LINES before='' after='\n' megabytes
    if [[ -t 2 ]]; then
        pause=1 before='\r\033[K' after=''
    fi
    while sleep "$pause" <&- >&- 2>&- && kill -0 "$$" 2>/dev/null; do
        megabytes=$(du -sm -- "$folder" 2>/dev/null | cut -f1) || true
        printf "$before  %d s, %s MB: %s$after" $((SECONDS - began)) "$megabytes" \
            "$(tail -n 1 -- "$log" 2>/dev/null | tr -cd '[:print:]' | cut -c -70)" >&2
    done
}

# make_environment FOLDER WHAT: a virtual environment with WHAT installed by pip ('.' or '.[dev]'); reused if it is there.
make_environment() {
    local folder=$1 what=$2 base log=$1/install.log build='' watcher status=0
    if [[ ! -x "$folder/bin/python" ]]; then
        base=$(find_base_python) || exit 2
        "$base" -c 'import ensurepip, venv' 2>/dev/null ||
            refuse "$base cannot make virtual environments; on Debian and Ubuntu: apt-get install $("$base" -c \
                'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
        echo "making a virtual environment in $folder"
        "$base" -m venv "$folder" >/dev/null || refuse "$folder: no virtual environment could be made in it"
    elif ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
        "$folder/bin/python" -m ensurepip >/dev/null 2>&1 ||
            refuse "$folder has no pip; install '$what' into it with the tool that made it, or move it away"
    fi
    if [[ "$folder/installed" -nt "$root/pyproject.toml" && "$(cat "$folder/installed")" == "$root $what" ]]; then
        return
    fi
    echo "installing the packages of pyproject.toml into $folder; log: $log"
    if ! has_driver && [[ $(uname -sm) == "Linux x86_64" ]]; then
        build=$("$folder/bin/python" "$root/examples/packages.py" cpu-torch 2>/dev/null) || build=
        if [[ $build ]]; then
            echo "no GPU here: taking $build, which pip offers"
        else
            echo "no GPU here, but the torch that pip offers brings CUDA: 4.9 GB in all, minutes to download. To take the CPU build" \
                "(0.8 GB) instead, press Ctrl-C, set PIP_EXTRA_INDEX_URL to the CPU index that pytorch.org/get-started names, start again."
        fi
    fi
    mkdir -p "$folder/tmp" # pip unpacks in it, so that the size of the folder shows how far it is
    show_progress "$folder" "$log" &
    watcher=$!
    (cd "$root" && TMPDIR=$folder/tmp "$folder/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
        ${build:+"$build"} -e "$what") >"$log" 2>&1 </dev/null || status=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    rm -rf -- "$folder/tmp"
    [[ ! -t 2 ]] || printf '\r\033[K' >&2
    if ((status)); then
        tail -n 20 "$log" >&2
        refuse "pip install -e '$what' failed, see above; its whole log is $log"
    fi
    echo "$root $what" >"$folder/installed"
}

# Sets `launcher`: torchrun of that Python.
find_launcher() {
    local torchrun
    torchrun=$(dirname -- "$1")/torchrun
    launcher=("$1" -m torch.distributed.run)
    if [[ -x "$torchrun" ]]; then
        launcher=("$torchrun")
    fi
}

# Is there a driver for GPUs? Nsight Systems makes /dev/nvidiactl where there is none: such a file cannot be opened.
has_driver() {
    command -v nvidia-smi >/dev/null 2>&1 || [[ -e /dev/kfd || -e /dev/dxg ]] || { [[ -c /dev/nvidiactl ]] && : </dev/nvidiactl; } 2>/dev/null
}

# Prints how many GPUs torch sees; without a driver that is 0, and torch, which takes seconds, is not asked.
count_gpus() {
    if has_driver; then
        "$1" -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null || echo 0
    else
        echo 0
    fi
}

# Prints the threads that each of $1 ranks may use on this machine.
threads_per_rank() {
    local cores
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    echo $((cores > $1 ? cores / $1 : 1))
}

# Prints a free port.
free_port() {
    "$1" -c 'import socket; s = socket.create_server(("", 0)); print(s.getsockname()[1])'
}

# Can rank 0 listen on port $2?
port_is_free() {
    "$1" -c 'import socket, sys; socket.create_server(("", int(sys.argv[1])))' "$2" >/dev/null 2>&1
}
