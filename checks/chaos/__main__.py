"""The long campaign: at least 60 faults under 200 streams, with metrics.

python -m checks.chaos --json chaos.json
"""

import sys
import tempfile
from pathlib import Path

from checks.chaos import command
from checks.chaos.campaign import Campaign, run


def main() -> int:
    """Run one campaign; print and store its results."""
    parser = command.parser("checks.chaos", __doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--faults-of-each-kind", type=int, default=15)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, help="processes of each worker (tensor parallelism)")
    parser.add_argument("--speculation", default="off", help="how workers propose draft tokens, such as ngram")
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="kinds of faults follow in turn for this time; 0: --faults-of-each-kind ends the campaign (default: 0)",
    )
    parser.add_argument("--busy", type=int, default=0, help="number of other processes that compute all the time")
    parser.add_argument(
        "--disk",
        type=Path,
        help="folder of a small file system, which is filled and emptied in turn, for journal and record",
    )
    parser.add_argument("--architecture", default="LlamaForCausalLM", help="class of the model in transformers")
    parser.add_argument("--tiers", type=Path, help="folder of a disk cache, for conversations that exceed the memory")
    options = parser.parse_args()
    campaign = Campaign(
        num_streams=options.streams,
        faults_of_each_kind=options.faults_of_each_kind,
        max_tokens=options.max_tokens,
        seed=options.seed,
        ranks=options.ranks,
        speculation=options.speculation,
        minutes=options.minutes,
        busy=options.busy,
        disk=options.disk,
        architecture=options.architecture,
        tiers=options.tiers,
    )
    with tempfile.TemporaryDirectory(prefix="quire-chaos-") as folder:
        command.tell(run(campaign, Path(folder)).figures(), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
