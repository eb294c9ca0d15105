# What a shell must know to go through a launch script and start nothing. Run with `bash --restricted -c THIS NAME TEXT ARGUMENTS...`.
#
# Three walls, one behind the other: a DEBUG trap looks at every command before it would run, and skips all that is no builtin
# or function of the script (skipped commands succeed and print nothing); the shell is a restricted one, which runs no paths,
# opens no files for writing and changes no PATH; and no program is on the PATH. Builtins that reach other processes or files
# are switched off. It takes a bounded amount of memory and writes a bounded record.
#
# Loops end: one that waits, since it runs `sleep`, is left there; after __max_commands commands every loop is left in its
# first round. So jobs in the background end by themselves, too.
#
# __record: a file descriptor for the command that is found; __nothing: one of /dev/null, which a restricted shell may still
# copy to, though it may not open it. All names here begin with __, since the script's own are looked up in between; $1, $2
# ... are those of the script, too.
set -T
shopt -s extdebug extglob
ulimit -v "$__max_memory" -f "$__max_record"
enable -n kill history fc suspend ulimit
__builtins=$(compgen -b) __keywords=$(compgen -k)
__builtins=" ${__builtins//$'\n'/ } " __keywords=" ${__keywords//$'\n'/ } "
__sources=() __commands=0 __leaves_loop=
# Trailing redirections, as bash prints a simple command: their targets hold no blanks outside quotes and $( ).
__target='([^][:space:]"'\''()<>]|"[^"]*"|'\''[^'\'']*'\''|\$\([^()]*\))+|[<>]\([^()]*\)'
__redirect='^(.*[^[:space:]])[[:space:]]+([0-9]*|&)(>>|>[|]|>&|>|<&|<>|<<<|<)[[:space:]]*('"$__target"')$'
__assigned='^([A-Za-z_][A-Za-z_0-9]*=([^[:space:]"'\''()`$]|"[^"]*"|'\''[^'\'']*'\''|\$\([^()]*\)|\$\{[^{}]*\}|\$[^({])*[[:space:]]+)+[^[:space:]#]'
__readonly='^((export|declare|typeset|readonly|local)[[:space:]]+(-[a-z]+[[:space:]]+)*)?(PATH|SHELL|ENV|BASH_ENV|HISTFILE)[+]?='
__file_test='^(\[\[|\[|test)[[:space:]]-[defrsL][[:space:]](([^][:space:]"'\''&|]|"[^"]*")+)([[:space:]]\]\]|[[:space:]]\])?$'

# Writes how many words $@ has, and they, how many variables the environment has, and they.
__write_down() {
    local __name __names IFS=$'\n'
    __names=($(compgen -e))
    printf '%s\0' "$#" "$@" "${#__names[@]}" >&"$__record"
    for __name in "${__names[@]}"; do
        printf '%s=%s\0' "$__name" "${!__name-}" >&"$__record"
    done
}

__found() {
    __write_down "$@"
    exit 0
}

# Does the command $@ hand on to another shell, which may start the trainer: sh -c "...", or a script?
__hands_on() {
    local __word __before=
    for __word in "$@"; do
        case ${__before##*/}:$__word in
            bash:-*c | sh:-*c | zsh:-*c) return 0 ;;
            *:*.sh) [[ -f $__word || -f $PWD/$__word ]] && return 0 ;;
        esac
        [[ $__word == -* ]] || __before=$__word
    done
    return 1
}

# Does the command $@ start the trainer? Not if it does something else to its file.
__trains() {
    local __word
    case ${1-} in
        cat | chmod | cp | diff | find | git | grep | head | ln | ls | mv | rm | rsync | scp | sed | tail | tar | wc) return 1 ;;
    esac
    for __word in "$@"; do
        case $__word in
            pretrain_gpt.py | */pretrain_gpt.py) return 0 ;;
        esac
    done
    return 1
}

# A file that the user names to the script counts as being there: the plan does not read it.
__is_given_file() {
    local __path __word
    eval "__path=$__operand"
    [[ -e $__path ]] && return 1
    for __word in ${__arguments[@]+"${__arguments[@]}"}; do
        [[ -n $__word && $__path == "$__word"* ]] && return 0
    done
    return 1
}

# Takes the redirections off __line; __writes says whether one of them would open a file for writing.
__without_redirections() {
    while [[ $__line =~ $__redirect ]]; do
        case ${BASH_REMATCH[3]}${BASH_REMATCH[4]} in
            \<* | \>\&[0-9-]*) ;;
            *) __writes=1 ;;
        esac
        __line=${BASH_REMATCH[1]}
    done
}

# Sets __kind: what bash takes the word $1 for. (type -t says it too, but in a process of its own.)
__look_up() {
    if declare -F -- "$1" >&"$__nothing"; then
        __kind=function
    elif [[ $__builtins == *" $1 "* ]]; then
        __kind=builtin
    elif [[ $__keywords == *" $1 "* ]]; then
        __kind=keyword
    else
        __kind=program
    fi
}

# Is the command in __line to be left out? Sees its words as bash would, after their expansion.
__skips_words() {
    local __words=() __all __kind
    eval "__words=($__line)"
    __all=(${__words[@]+"${__words[@]}"})
    while [[ ${__words[0]-} =~ ^[A-Za-z_][A-Za-z_0-9]*=|^exec$ ]]; do
        __words=("${__words[@]:1}")
    done
    [[ ${__words[0]-} != ?(*/)?(u)sleep ]] || __leaves_loop=1
    __trains ${__all[@]+"${__all[@]}"} && __found "${__all[@]}"
    __hands_on ${__all[@]+"${__all[@]}"} && __write_down "${__all[@]}"
    __look_up "${__words[0]-}"
    [[ $__kind == program || -n $__writes || $__line == exec* ]]
}

# Is the command that bash is about to run to be left out? Leaves the script's last match as it was; older shells forbid that.
__skips() {
    local __match=(${BASH_REMATCH[@]+"${BASH_REMATCH[@]}"}) __skipped=1
    __leaves_loop= __commands=$((__commands + 1))
    ((__commands <= __max_commands)) || __leaves_loop=1
    __judge "$@" && __skipped=0
    ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 501)) || BASH_REMATCH=(${__match[@]+"${__match[@]}"})
    return "$__skipped"
}

__judge() {
    local __line=$BASH_COMMAND __writes= __first __operand __kind
    [[ $__line =~ $__readonly ]] && return 0
    if [[ $__line =~ $__file_test ]]; then
        __operand=${BASH_REMATCH[2]}
        __is_given_file "$@"
        return
    fi
    case $__line in
        '[['* | '(('* | 'for '* | 'case '* | 'select '*) return 1 ;;
        '>'* | '&>'* | [0-9]'>'*) return 0 ;;
        *'<<'[!'<']*) __line=${__line%%<<*} ;;
    esac
    __without_redirections
    __first=${__line%%[[:space:]]*}
    __look_up "$__first"
    case $__kind:$__first in
        program:[A-Za-z_]*=*)
            [[ $__line =~ $__assigned ]] || return 1
            __skips_words "$@"
            ;;
        builtin:exec | function:command | function:nsys) __skips_words "$@" ;;
        builtin:*) [[ -n $__writes ]] ;;
        function:*)
            [[ -n $__writes ]] || return 1
            eval "$__line"
            return 0
            ;;
        keyword:*) return 1 ;;
        *) __skips_words "$@" ;;
    esac
}

# Makes the text in __text one that can run here; $1: the file that it is of.
__adapt() {
    local null=/dev/null blank own="__sources[${#__sources[@]}]"
    __sources+=("$1")
    for blank in '' ' '; do
        __text=${__text//"&>$blank$null"/">&$__nothing 2>&$__nothing"}
        __text=${__text//">>$blank$null"/">&$__nothing"}
        __text=${__text//">$blank$null"/">&$__nothing"}
    done
    __text=${__text//'BASH_SOURCE[0]'/"$own"}
    __text=${__text//'${BASH_SOURCE'/"\${$own"}
    __text=${__text//'$BASH_SOURCE'/"\${$own}"}
}

# $1 as a path from the root, without . and ..
__absolute() {
    local part parts=() path=$1 IFS=/
    [[ $path == /* ]] || path=$PWD/$path
    for part in $path; do
        case $part in
            '' | .) ;;
            ..) ((${#parts[@]} == 0)) || unset "parts[${#parts[@]}-1]" ;;
            *) parts+=("$part") ;;
        esac
    done
    __text=/${parts[*]-}
}

cd() {
    while [[ ${1-} == -?* ]]; do shift; done
    __absolute "${1:-${HOME:-/}}"
    PWD=$__text
}
pushd() { cd "$@"; }
popd() { :; }
pwd() { printf '%s\n' "$PWD"; }
dirname() {
    [[ $1 == -- ]] && shift
    case $1 in
        */*) printf '%s\n' "${1%/*}" ;;
        *) printf '.\n' ;;
    esac
}
basename() {
    [[ $1 == -- ]] && shift
    local name=${1##*/}
    printf '%s\n' "${name%"${2-}"}"
}
realpath() {
    while [[ ${1-} == -* ]]; do shift; done
    __absolute "${1-.}"
    printf '%s\n' "$__text"
}
readlink() { realpath "$@"; }
source() {
    __absolute "$1"
    shift
    [[ -f $__text ]] || return 0
    __sourced=$__text
    __text=$(<"$__sourced") || return 0
    __adapt "$__sourced"
    eval "$__text"
}
function . { source "$@"; }
trap() { :; }
# Whatever a script looks for is there, and Nsight Systems has all its options.
command() {
    case ${1-} in
        -v | -V) printf '%s\n' "${2-}" ;;
        *) "$@" ;;
    esac
}
which() { printf '%s\n' "${1-}"; }
nsys() { printf '%s\n' --capture-range --capture-range-end --kill --cuda-graph-trace --nvtx-capture --cpuctxsw; }
command_not_found_handle() {
    __trains "$@" && __found "$@"
    return 0
}

__text=$1 __arguments=("${@:2}")
shift
__adapt "$0"
# break: of the loop that the command stands in. Behind ! no failure within ends a script that has set -e.
builtin trap '__skips "$@" && __skipped=1 || __skipped=
[[ -z $__leaves_loop ]] || break 2>&"$__nothing"
! [[ $__skipped ]]' DEBUG
eval "$__text"
