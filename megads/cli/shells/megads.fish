# Tab completion of megads for fish. In ~/.config/fish/config.fish: megads completion fish | source

function __megads_complete
    set -l words (commandline --tokenize --cut-at-cursor --current-process)
    set -l current (commandline --current-token --cut-at-cursor)
    set -l found ($words[1] __complete $words[2..] "$current" 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        # File names where there is nothing else to offer, after the `=` too.
        set -l key (string match --regex '^[^=]*=' -- $current)
        __fish_complete_path (string replace --regex '^[^=]*=' '' -- $current) | string replace --regex '^' -- "$key"
    end
end

complete --command megads --no-files --arguments '(__megads_complete)'
