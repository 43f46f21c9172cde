#!/bin/sh
# Prints the path of a Python that jshadow can use: `sh tools/find_python.sh [WANTED [VERSION]]`.
# WANTED: a command or a path, which then must be new enough. "": any is looked for. VERSION: "3.12" or "3.13" alone.
wanted=$1
version=$2
least=${2:-3.12}
need=${2:-$least or newer}

# 0 if a command is a Python of the wanted version. A shim of pyenv can be on the PATH and not run.
suits() {
    "$1" - "${version:-}" 2>/dev/null <<'CODE'
import sys
wanted = sys.argv[1]
sys.exit(sys.version_info < (3, 12) or bool(wanted) and "%d.%d" % sys.version_info[:2] != wanted)
CODE
}

if [ -n "$wanted" ]; then
    if suits "$wanted"; then
        command -v "$wanted"
        exit 0
    fi
    found=$(command -v "$wanted" >/dev/null && "$wanted" --version 2>&1 | head -n 1)
    echo "jshadow needs Python $need, and $wanted is: ${found:-not found}." >&2
    exit 1
fi
for candidate in python3.13 python3.12 python3 "$HOME"/.pyenv/versions/3.1[23]*/bin/python3 \
    "$(uv python find ">=$least" 2>/dev/null)"; do
    if [ -n "$candidate" ] && suits "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done
echo "No Python $need was found: install one (apt install python$least, brew install" \
    "python@$least or uv python install $least), or name it: make PYTHON=/path/to/python$least" >&2
exit 1
