# Tab completion of megads for bash. In ~/.bashrc: eval "$(megads completion bash)"

_megads_complete() {
    local line=${COMP_LINE:0:COMP_POINT} words text _
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    # Readline takes `=` and `:` for ends of words and replaces only what follows the last of them.
    local current=${words[-1]} kept=""
    [[ $COMP_WORDBREAKS == *=* ]] && kept=${current%"${current##*[=:]}"}
    COMPREPLY=()
    while IFS=$'\t' read -r text _; do
        COMPREPLY+=("${text#"$kept"}")
        # More follows a section or a key.
        [[ $text == *[=.] ]] && compopt -o nospace 2>/dev/null
    done < <("$1" __complete "${words[@]:1}" 2>/dev/null)
}

# File names where there is nothing else to offer.
complete -o default -F _megads_complete megads
