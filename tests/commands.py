"""Command lines of one module, read in one process: the configs or the refusals that they give."""

import json

from processes import ran

PROGRAM = """
import json, runpy, sys
from absl import flags
from dapo_jax.cli import command
def run(main):
    command.parse_flags(sys.argv)
    print(flags.FLAGS.config.to_json_best_effort().replace("\\n", ""))
command.run, common = run, set(flags.FLAGS)
module, commands = sys.argv[1], json.loads(sys.argv[2])
for given in commands:
    sys.argv = [module, *given]
    try:
        runpy.run_module(module, run_name="__main__")
    except (ValueError, SystemExit) as error:
        print(json.dumps(str(error)))
    for flag in set(flags.FLAGS) - common:
        delattr(flags.FLAGS, flag)
"""


def read(module: str, *given: str) -> list:
    """Returns of each command line the config, as JSON has it, or the words that it ends with."""
    commands = json.dumps([it.split() for it in given])
    return [json.loads(line) for line in ran("-c", PROGRAM, module, commands).stdout.splitlines()]
