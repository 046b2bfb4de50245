"""Loop shared by all adapters: read the requests, submit each at its time within the concurrency limit, and record when
tokens arrive.

Adapters run in the peer's own virtual environment, so this module imports nothing from Quire. A peer is an object with
two methods: `start(index, request)` submits a request. `poll()` runs a step (or waits briefly) and returns `(index,
number of new tokens, finished)` for each request that progressed.
"""

import argparse
import json
import time


class Progress:
    """One request in flight."""

    def __init__(self):
        self.times = []
        self.finished = False


def serve(peer, requests, max_concurrency):
    """Serve the requests in order of arrival; return the token times of each request, in seconds since the start."""
    order = sorted(range(len(requests)), key=lambda index: requests[index]["arrive_s"])
    progress = {}
    begin = time.perf_counter()
    live = 0
    while order or live:
        now = time.perf_counter() - begin
        while order and live < max_concurrency and requests[order[0]]["arrive_s"] <= now:
            index = order.pop(0)
            progress[index] = Progress()
            peer.start(index, requests[index])
            live += 1
        if not live:
            time.sleep(max(0.0, requests[order[0]]["arrive_s"] - (time.perf_counter() - begin)))
            continue
        updates = peer.poll()
        now = time.perf_counter() - begin
        for index, count, finished in updates:
            progress[index].times += [now] * count
            if finished and not progress[index].finished:
                progress[index].finished = True
                live -= 1
    return [progress[index].times for index in range(len(requests))]


def main(make_peer, versions):
    """Serve each request file that the command line names, and write the times for all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("workloads", nargs="+", metavar="NAME:MAX_CONCURRENCY:FILE")
    options = parser.parse_args()
    peer = make_peer(options)
    times = {}
    for workload in options.workloads:
        name, max_concurrency, path = workload.split(":", 2)
        with open(path) as file:
            requests = [json.loads(line) for line in file]
        for request in requests:
            if request["prime"]:
                serve(peer, [{**request, "arrive_s": 0.0}], 1)
        times[name] = serve(peer, [request for request in requests if not request["prime"]], int(max_concurrency))
    with open(options.out, "w") as file:
        json.dump({"versions": versions(), "times": times}, file)
