# shellcheck shell=bash
# shellcheck disable=SC2154 # python comes from the script that sources this, refuse from environment.sh
# Sourced by start scripts: runs a command under Nsight Systems, and looks whether a report with the steps came out.

HOW_TO_GET_NSYS="get Nsight Systems from https://developer.nvidia.com/nsight-systems (Debian, non-free: apt-get install \
nsight-systems), or set NSYS=/path/to/nsys, or leave --nsys out to use torch.profiler"

# Sets `nsys`: $NSYS if it is set, else the one on the PATH or of a usual folder. Refuses if there is none that can work.
find_nsys() {
    local candidate
    if [[ -n ${NSYS_PROFILING_SESSION_ID:-} ]]; then
        refuse "--nsys: this shell runs under nsys already; start it without, or leave --nsys out"
    fi
    nsys=
    for candidate in "${NSYS:-nsys}" /usr/local/cuda/bin/nsys /opt/nvidia/nsight-systems*/bin/nsys \
        /opt/nvidia/nsight-systems/*/bin/nsys; do
        if command -v "$candidate" >/dev/null 2>&1; then
            nsys=$(command -v "$candidate")
            break
        fi
        [[ -z ${NSYS:-} ]] || refuse "NSYS=$NSYS: cannot be run; $HOW_TO_GET_NSYS"
    done
    [[ -n $nsys ]] || refuse "--nsys: there is no nsys on the PATH; $HOW_TO_GET_NSYS"
    nsys_help=$("$nsys" profile --help 2>&1) || true
    nsys_knows --capture-range || refuse "$nsys has no --capture-range, without which the whole run would be recorded; $HOW_TO_GET_NSYS"
}

# Does this nsys have this long option? It may be listed as --name= or -n, --name=.
nsys_knows() {
    local listed="(^|[[:space:],])$1([=[:space:]]|\$)"
    [[ $nsys_help =~ $listed ]]
}

# Refuses if the ranges of a run without GPUs could not be recorded. They are of NVIDIA's package, or of a CUDA build.
require_nvtx() {
    "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("nvtx") is None)' 2>/dev/null ||
        "$python" -c 'from torch._C import _nvtx' 2>/dev/null ||
        refuse "--nsys: $python lacks the package nvtx, and without a GPU there is nothing else to record; run: '$python' -m pip install nvtx"
}

# Sets `nsys_options`: those that we would like and that this nsys has. $1: the GPUs that torch sees.
choose_nsys_options() {
    local wanted option missing=()
    # Collection ends with the window and training goes on; nsys's own default may end the training as well.
    wanted=(--capture-range-end=stop --kill=none)
    if (($1)); then
        nsys_options=(-t "cuda,nvtx" --capture-range=cudaProfilerApi)
        wanted+=(--cuda-graph-trace=node)
    else
        nsys_options=(-t nvtx --capture-range=nvtx)
        wanted+=(--nvtx-capture=profile)
    fi
    if [[ ${NSYS_BACKTRACES:-0} == 1 ]] && (($1)); then
        # Stacks of CUDA calls need CPU sampling: with -s none nsys would drop them.
        nsys_options+=(-s process-tree)
        wanted+=(--cudabacktrace=all --python-backtrace=cuda)
    else
        nsys_options+=(-s none)
        wanted+=(--cpuctxsw=none)
    fi
    for option in "${wanted[@]}"; do
        if nsys_knows "${option%%=*}"; then
            nsys_options+=("$option")
        else
            missing+=("$option")
        fi
    done
    if ((${#missing[@]})); then
        echo "note: $("$nsys" --version 2>/dev/null | head -n 1 || echo "$nsys") does not know ${missing[*]}; left out"
    fi
}

# Sets `nsys_report`: FOLDER/NAME_JOB_nodeN without its ending; no file begins so yet. $1: FOLDER, $2: NAME, $3: N.
choose_nsys_report() {
    local job=${SLURM_JOB_ID:-${PBS_JOBID:-${LSB_JOBID:-}}} name number=1
    job=${job:+job$job}
    job=${job:-$(date +%Y%m%d-%H%M%S)}
    name=$2_${job//[!A-Za-z0-9.-]/-}_node$3
    mkdir -p -- "$1" 2>/dev/null || true # nsys makes no folders, and would lose the report
    [[ -d $1 && -w $1 ]] || refuse "$1: Nsight Systems' report could not be written there; make the folder writable, or leave --nsys out"
    nsys_report=$1/$name
    while compgen -G "$(printf '%q' "$nsys_report").*" >/dev/null; do
        number=$((number + 1))
        nsys_report=$1/$name-$number
    done
}

# shed_secrets SCRIPT ARGUMENTS...: starts the script anew without the variables that may be secret, if there are any.
# nsys writes the environment of every process that it can read into the report: this script's own too.
shed_secrets() {
    local name names=() options=()
    while read -r name; do
        case $(tr '[:lower:]' '[:upper:]' <<<"$name") in
            TOKENIZERS_* | *_PKEY) ;; # a partition of InfiniBand is no secret
            *TOKEN* | *KEY* | *SECRET* | *PASSWORD* | *PASSWD* | *CREDENTIAL*)
                options+=(-u "$name")
                names+=("$name")
                ;;
        esac
    done < <(compgen -e)
    if ((${#names[@]})); then
        echo "note: ${names[*]}: kept from the run, since Nsight Systems' reports hold the environment"
        exec env "${options[@]}" "$BASH" "$@"
    fi
}

# run_under_nsys GPUS COMMAND...: trains, then says what the report holds, or why there is none. Returns the command's
# exit code; 3 if that is 0 and there is no report, or none of our steps in it. choose_nsys_report comes before.
run_under_nsys() {
    local gpus=$1 status=0 nsys_options
    shift
    choose_nsys_options "$gpus"
    record "$@" || status=$?
    import_report
    if [[ -f $nsys_report.nsys-rep ]]; then
        describe_report "$nsys_report.nsys-rep" || return $((status ? status : 3))
    elif [[ -f $nsys_report.qdrep ]]; then # before 2021.4
        describe_report "$nsys_report.qdrep" || return $((status ? status : 3))
    elif [[ -f $nsys_report.qdstrm ]]; then
        return $((status ? status : 3)) # import_report has said it
    elif ((status)); then
        echo "no Nsight Systems report: the run failed (exit code $status), see above" >&2
    else
        echo "no Nsight Systems report, though nsys ended with exit code 0: was --profile-step-start reached, by a rank of" \
            "this node that is among --profile-ranks? See above what nsys and the trainer said" >&2
        return 3
    fi
    return "$status"
}

# record COMMAND...: runs it under nsys. Starts nsys again if it fails before the command begins, as nsys 2022 sometimes does
# when another one has just ended ("Connection reset by peer", "Local Endpoint is not available").
record() {
    local status attempt folder
    folder=$(mktemp -d)
    for attempt in 1 2 3; do
        status=0
        # nsys replaces %h, %p and others in the name, and waits for ranges by any string, registered or not
        # shellcheck disable=SC2016 # that bash is to read these
        NSYS_NVTX_PROFILER_REGISTER_ONLY=0 "$nsys" profile "${nsys_options[@]}" -o "${nsys_report//\%/%%}" \
            "$BASH" -c ': >"$0" && exec "$@"' "$folder/begun" "$@" || status=$?
        if ((status == 0)) || [[ -e $folder/begun ]]; then
            break
        fi
        echo "note: nsys failed before training began (exit code $status, attempt $attempt of 3)" >&2
        sleep 1
    done
    rm -rf -- "$folder"
    return "$status"
}

# Makes the .nsys-rep of a .qdstrm, which is all that an nsys without its importer at hand leaves.
import_report() {
    local importer
    [[ -f $nsys_report.qdstrm && ! -f $nsys_report.nsys-rep && ! -f $nsys_report.qdrep ]] || return 0
    if ! importer=$(find_importer); then
        echo "Nsight Systems report: $nsys_report.qdstrm, not imported: there is no QdstrmImporter here; on a machine with" \
            "the whole of $("$nsys" --version 2>/dev/null | head -n 1) run: QdstrmImporter -i FILE" >&2
    elif ! "$importer" -i "$nsys_report.qdstrm" >"$nsys_report.import.log" 2>&1 || [[ ! -f $nsys_report.nsys-rep ]]; then
        echo "Nsight Systems report: $nsys_report.qdstrm, which $importer could not import: $(tail -n 1 \
            "$nsys_report.import.log"); its whole log is $nsys_report.import.log" >&2
    else
        echo "nsys has no importer by itself here; $importer made the report"
        rm -f -- "$nsys_report.qdstrm" "$nsys_report.import.log"
    fi
}

# Prints the QdstrmImporter that belongs to nsys; it lies in a folder beside nsys's own.
find_importer() {
    local folder candidate
    folder=$(dirname -- "$(readlink -f -- "$nsys")")
    for candidate in "$folder"/../host-linux-*/QdstrmImporter "$folder"/../../host-linux-*/QdstrmImporter \
        "$folder"/../../../nsight-systems/host-linux-*/QdstrmImporter \
        "$folder"/../lib/nsight-systems/host-linux-*/QdstrmImporter QdstrmImporter; do
        if command -v "$candidate" >/dev/null 2>&1; then
            readlink -f -- "$(command -v "$candidate")"
            return
        fi
    done
    return 1
}

# Says which steps, ranks, kernels and possible secrets the report $1 holds; 1 if there are no steps in it.
describe_report() {
    local folder status=0 said
    folder=$(mktemp -d)
    # from an empty folder: nsys runs Python files of the folder that it is called in
    if (cd -- "$folder" && "$nsys" export --type sqlite --output "$folder/report.sqlite" "$1" >export.log 2>&1) &&
        [[ -s $folder/report.sqlite ]]; then
        said=$("$python" "$root/examples/nsight_contents.py" "$folder/report.sqlite" 2>&1) || status=1
    else
        said="nsys export could not read it: $(tail -n 1 "$folder/export.log")"
        status=1
    fi
    rm -rf -- "$folder"
    if ((status)); then
        echo "Nsight Systems report: $1, but ${said##*$'\n'}" >&2
    else
        echo "Nsight Systems report: $1 (${said%%$'\n'*})"
        [[ $said != *$'\n'* ]] || echo "  ${said#*$'\n'}"
        echo "  open it with nsys-ui, or: nsys stats '$1'"
    fi
    return "$status"
}
