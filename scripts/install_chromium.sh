#!/usr/bin/env bash
# Installs Chromium, in which tests open what `megads report` writes. Does nothing where one is found; without root or
# apt-get it says so and succeeds: those tests then skip themselves with the same reason.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then
        echo "browser: $(command -v "$name") is there already"
        exit 0
    fi
done
if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]]; then
    echo "browser: none found and no apt-get or no root to install one: the tests that need a browser skip themselves" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium >/dev/null
echo "browser: installed $(command -v chromium)"
