# Tab completion of megads for zsh. In ~/.zshrc, after compinit: eval "$(megads completion zsh)"

_megads_complete() {
    local -a ended open
    local text explanation
    while IFS=$'\t' read -r text explanation; do
        # More follows a section or a key.
        if [[ $text == *[=.] ]]; then
            open+=("${text//:/\\:}:$explanation")
        else
            ended+=("${text//:/\\:}:$explanation")
        fi
    done < <("${words[1]}" __complete "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)
    if (( $#open + $#ended )); then
        _describe -t keys 'key' open -S '' -- ended
    else
        compset -P '*='
        _files
    fi
}

compdef _megads_complete megads
