"""The process that checks grammars: a line of JSON in, with a grammar; a line out, with why it is refused, or "".

llguidance can take minutes for a schema of a few kilobytes, and the whole stack of a thread, which ends a process. So
this process limits its CPU seconds for each grammar, its memory and its stack. It imports nothing of jshadow, so that
it starts quickly. It ends when its input does.
"""

import json
import resource
import sys
import threading

_SECONDS = 2  # CPU seconds for one grammar; the system counts whole ones, so at least one
_MEMORY = 2**31
_STACK = 2**22  # half of what a thread of the server has


def _problem(grammar: str) -> str:
    """Return why llguidance refuses a grammar, or "". The time counts from here on."""
    from llguidance import LLMatcher

    usage = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + _SECONDS, resource.RLIM_INFINITY))
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(str(LLMatcher.validate_grammar(grammar))))
    thread.start()
    thread.join()
    return found[0]


def _main() -> None:
    """Answer each line."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    threading.stack_size(_STACK)
    for line in sys.stdin:
        print(json.dumps(_problem(json.loads(line))), flush=True)


if __name__ == "__main__":
    _main()
