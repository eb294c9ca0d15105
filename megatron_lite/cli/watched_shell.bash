# What a shell must know to go through a launch script and start nothing. Run with `bash --restricted -c THIS NAME TEXT ARGUMENTS...`.
#
# Three walls, one behind the other: a DEBUG trap looks at every command before it would run, and skips all that is no builtin
# or function (skipped commands succeed and print nothing); the shell is a restricted one, which runs no paths,
# opens no files for writing and changes no PATH; and no program is on the PATH. Builtins that reach other processes or files
# are switched off. It takes a bounded amount of memory and writes a bounded record.
#
# Loops end: one that waits, since it runs `sleep` again and again, is left there; after __max_commands commands every loop is left in its
# first round. So jobs in the background end by themselves, too.
#
# Small programs that a script asks for words (seq, cut, date ...) are functions that ask the process which started this shell:
# it says what they would print, or nothing. It also keeps what the script would write, for scripts that read or start it again.
#
# __record: a file descriptor for the commands that are found; __nothing: one of /dev/null, which a restricted shell may still
# copy to, though it may not open it; __question, __reply: pipes to that process and back; __turn, __turn_back: the ends of a
# pipe with one byte, which whoever asks holds so long. __tools: names of programs that are asked for; __scripts: a pattern of words
# that name scripts, behind a colon. __all_given: whether
# every file that the script looks for counts as being there. All names here begin with __, since the script's own are looked up in between; $1, $2
# ... are those of the script, too.
set -T
shopt -s extdebug extglob
ulimit -v "$__max_memory" -f "$__max_record"
enable -n kill history fc suspend ulimit
__builtins=$(compgen -b) __keywords=$(compgen -k)
__builtins=" ${__builtins//$'\n'/ } " __keywords=" ${__keywords//$'\n'/ } "
__sources=() __commands=0 __leaves_loop= __asked=0 __launches=0 __max_launches=64 __sleeps=0 __max_sleeps=20
# Trailing redirections, as bash prints a simple command: their targets hold no blanks outside quotes and $( ).
__target='([^][:space:]"'\''()<>]|"[^"]*"|'\''[^'\'']*'\''|\$\([^()]*\))+|[<>]\([^()]*\)'
__redirect='^(.*[^[:space:]])[[:space:]]+([0-9]*|&)(>>|>[|]|>&|>|<&|<>|<<<|<)[[:space:]]*('"$__target"')$'
__here='^(.*[^<])<<(-?)[[:space:]]*([^[:space:]<>;|&]+)(.*)$'
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

# The trainer's launch is left out like any other program; the script goes on, and may have more of them.
__found() {
    __write_down "$@"
    __launches=$((__launches + 1))
    ((__launches < __max_launches)) || exit 0
}

# $1: run, input, write, quoted or left; the rest: words for the process that started this shell. Prints its answer.
__ask() {
    local IFS= __kind=$1 __id=${BASHPID-$$}.$((__asked += 1)) __got= __code=0 __answer=
    shift
    read -r -n 1 -u "$__turn" __got || return 0
    printf '%s\0' "$__kind" "$__id" "$PWD" "$#" "$@" >&"$__question"
    while read -r -d '' -u "$__reply" __got; do
        read -r -d '' -u "$__reply" __code || :
        read -r -d '' -u "$__reply" __answer || :
        [[ $__got != "$__id" ]] || break
    done
    printf x >&"$__turn_back"
    case $__code in
        input)
            __got=
            read -r -d '' -n 60000 __got || :
            __ask input "$__got" "$@"
            return
            ;;
    esac
    printf '%s' "$__answer"
    return "$__code"
}
readonly -f __ask

# Does the program $1 do something else to a file than starting it?
__only_handles() {
    case ${1##*/} in
        cat | chmod | cp | diff | find | git | grep | head | ln | ls | mv | rm | rsync | scp | sed | tail | tar | wc) return 0 ;;
    esac
    return 1
}

# Does the command $@ hand on to another shell or to the batch system, which may start the trainer: sh -c "...", or a script?
__hands_on() {
    local __word __before=
    __only_handles "${1-}" && return 1
    for __word in "$@"; do
        case ${__before##*/}:$__word in
            bash:-*c | sh:-*c | zsh:-*c | sbatch:--wrap | sbatch:--wrap=*) return 0 ;;
            $__scripts) return 0 ;;
            *:*[[:space:]]*pretrain_gpt.py* | *:*pretrain_gpt.py[[:space:]]*) return 0 ;;
            bash:[!-]* | sh:[!-]* | sbatch:[!-]* | qsub:[!-]* | bsub:[!-]*) return 0 ;;
        esac
        case $__word in
            -*) ;;
            *) __before=$__word ;;
        esac
    done
    case ${__before##*/} in
        bash | sh | zsh | sbatch | qsub | bsub) [[ -z $__heredoc ]] || return 0 ;;
    esac
    return 1
}

# Does the command $@ start the trainer? Not if it does something else to its file.
__trains() {
    local __word
    __only_handles "${1-}" && return 1
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
    __ask made "$__path" && return 0
    [[ -z $__all_given ]] || return 0
    for __word in ${__arguments[@]+"${__arguments[@]}"}; do
        [[ -n $__word && $__path == "$__word"* ]] && return 0
    done
    return 1
}

# Takes the redirections off __line; __writes says whether one of them would open a file for writing, __into which one takes
# the output, and __heredoc what comes in by one.
__without_redirections() {
    while [[ $__line =~ $__redirect ]]; do
        case ${BASH_REMATCH[3]} in
            '<<<') [[ $__first_word != @(bash|sh|sbatch|qsub|bsub|*/bash|*/sh) ]] || eval "__heredoc=${BASH_REMATCH[4]}" ;;
            '<') __from=${BASH_REMATCH[4]} ;;
        esac
        case ${BASH_REMATCH[3]}${BASH_REMATCH[4]} in
            \<* | \>\&[0-9-]*) ;;
            *)
                __writes=1
                case ${BASH_REMATCH[2]}:${BASH_REMATCH[3]} in
                    :'>>' | 1:'>>') __into=${BASH_REMATCH[4]} __appends=1 ;;
                    :'>' | 1:'>' | :'>|' | '&:>') __into=${BASH_REMATCH[4]} ;;
                esac
                ;;
        esac
        __line=${BASH_REMATCH[1]}
    done
}

# Takes a here-document off __line, into __heredoc as bash would expand it.
__without_heredoc() {
    local __head=${__line%%$'\n'*} __delimiter __body
    if [[ $__head =~ $__here && $__line == *$'\n'* ]]; then
        __body=${__line#*$'\n'} __delimiter=${BASH_REMATCH[3]}
        __line="${BASH_REMATCH[1]}${BASH_REMATCH[4]}"
        __line=${__line%%*([[:space:]])}
        eval "IFS= read -r -d '' __heredoc <<$__delimiter"$'\n'"$__body"$'\n' || :
    else
        __line=${__line%%<<*}
    fi
}

# What the words in __line print goes into the file __into, which the process that started this shell keeps.
__keep_output() {
    local __path __text
    eval "__path=$__into"
    [[ $__path != /dev/* ]] || return 0
    if [[ -n $__heredoc ]]; then
        __text=$(printf '%s' "$__heredoc" | eval "$__line"; printf x)
    else
        __text=$(eval "$__line"; printf x)
    fi
    __ask write "$__path" "$__appends" "${__text%x}"
    return 0
}

# Sets __kind: what bash takes the word $1 for. (type -t says it too, but in a process of its own.)
__look_up() {
    if declare -F -- "$1" >&"$__nothing" 2>&1; then
        __kind=function
    elif [[ $__builtins == *" $1 "* ]]; then
        __kind=builtin
    elif [[ $__keywords == *" $1 "* ]]; then
        __kind=keyword
    else
        __kind=program
    fi
}

# A shell, or what submits a job, that has no script yet: it may be piped to it.
__take_script() {
    local __text= IFS=
    if [[ -p /dev/stdin ]]; then
        read -r -d '' -n 60000 __text || :
    fi
    [[ -z $__text ]] || __write_down "$@" "<<" "$__text"
    return 0
}
readonly -f __take_script __write_down

# Is the command in __line to be left out? Sees its words as bash would, after their expansion.
__skips_words() {
    local __words=() __all __kind
    eval "__words=($__line)"
    __all=(${__words[@]+"${__words[@]}"})
    while [[ ${__words[0]-} =~ ^[A-Za-z_][A-Za-z_0-9]*=|^exec$ ]]; do
        __words=("${__words[@]:1}")
    done
    if [[ ${__words[0]-} == ?(*/)?(u)sleep ]]; then
        __sleeps=$((__sleeps + 1))
        ((__sleeps <= __max_sleeps)) || __leaves_loop=1
    fi
    __look_up "${__words[0]-}"
    if __trains ${__all[@]+"${__all[@]}"}; then
        __found "${__all[@]}"
        [[ $__line != exec* ]] || exit 0
        return 0
    fi
    [[ -z $__from || " $__takers " != *" ${__words[0]-} "* ]] || eval "__heredoc=\$(cat $__from)"
    if __hands_on ${__all[@]+"${__all[@]}"}; then
        __kind=program
        __write_down "${__all[@]}" ${__heredoc:+"<<" "$__heredoc"}
    elif [[ $__kind == program && $BASH_SUBSHELL != 0 ]]; then
        __ask left "${__all[@]}"
    fi
    [[ $__kind == program || -n $__writes || $__line == exec* ]]
}

# Is the command that bash is about to run to be left out? Leaves the script's last match as it was; older shells forbid that.
__skips() {
    local __match=(${BASH_REMATCH[@]+"${BASH_REMATCH[@]}"}) __skipped=1
    __leaves_loop=
    [[ ${FUNCNAME[1]-} != @(__ask|__take_script|__write_down) ]] || return 1
    __commands=$((__commands + 1))
    ((__commands <= __max_commands)) || __leaves_loop=1
    __judge "$@" && __skipped=0
    ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 501)) || BASH_REMATCH=(${__match[@]+"${__match[@]}"})
    return "$__skipped"
}

__judge() {
    local __line=$BASH_COMMAND __writes= __into= __appends= __from= __heredoc= __first __operand __kind
    local __first_word=${BASH_COMMAND%%[[:space:]]*}
    [[ $__line =~ $__readonly ]] && return 0
    if [[ $__line =~ $__file_test ]]; then
        __operand=${BASH_REMATCH[2]}
        __is_given_file "$@"
        return
    fi
    case $__line in
        '[['* | '(('* | 'for '* | 'case '* | 'select '*) return 1 ;;
        '>'* | '&>'* | [0-9]'>'*) return 0 ;;
        *'<<'[!'<']*) __without_heredoc ;;
    esac
    __without_redirections
    __first=${__line%%[[:space:]]*}
    __look_up "$__first"
    case $__kind:$__first in
        program:[A-Za-z_]*=*)
            [[ $__line =~ $__assigned ]] || return 1
            __skips_words "$@"
            ;;
        builtin:exec | function:command | function:nsys | function:python | function:python3) __skips_words "$@" ;;
        function:env | function:timeout | function:nice | function:stdbuf | function:srun) __skips_words "$@" ;;
        function:bash | function:sh | function:zsh | function:sbatch | function:qsub | function:bsub) __skips_words "$@" ;;
        builtin:echo | builtin:printf)
            [[ -n $__writes ]] || return 1
            [[ -z $__into ]] || __keep_output
            return 0
            ;;
        builtin:*) [[ -n $__writes ]] ;;
        function:*)
            [[ -n $__writes ]] || return 1
            if [[ " $__tools " == *" $__first "* ]]; then
                [[ -z $__into ]] || __keep_output
                return 0
            fi
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
    __sourced=$__text
    __text=$(__ask written "$__sourced") || { [[ -f $__sourced ]] && __text=$(<"$__sourced"); } || return 0
    [[ $__text != *=\<[A-Za-z]* ]] || __text=$(__ask quoted "$__text")
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
    if __trains "$@"; then
        __found "$@"
    else
        __ask left "$@"
    fi
    return 0
}

for __tool in $__tools; do
    # Also by their paths, where scripts name them so.
    for __folder in '' /bin/ /usr/bin/; do
        eval "function $__folder$__tool { __ask run $__tool \"\$@\"; }"
    done
done
__takers="bash sh zsh sbatch qsub bsub"
for __tool in $__takers; do
    eval "$__tool() { __take_script $__tool \"\$@\"; }"
done
unset -v __tool __folder

__text=$1 __arguments=("${@:2}")
shift
__adapt "$0"
# break: of the loop that the command stands in. Behind ! no failure within ends a script that has set -e.
builtin trap '__skips "$@" && __skipped=1 || __skipped=
[[ -z $__leaves_loop ]] || break 2>&"$__nothing"
! [[ $__skipped ]]' DEBUG
eval "$__text"
