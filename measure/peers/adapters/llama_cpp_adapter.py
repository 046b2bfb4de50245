"""llama.cpp's server over loopback HTTP: 16 slots, continuous batching, streamed. Variants: bf16, q8_0, q4_k_m.

`--model` is the GGUF file; LLAMA_SERVER names the server's binary.
"""

import http.client
import json
import os
import queue
import socket
import subprocess
import threading
import time

from pace import main

SLOTS = 16
SLOT_TOKENS = 2_304
START_S = 120.0


class Peer:
    def __init__(self, options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [
            os.environ["LLAMA_SERVER"], "-m", options.model, "--host", "127.0.0.1", "--port", str(self._port),
            "-np", str(SLOTS), "-c", str(SLOTS * SLOT_TOKENS), "-t", str(options.threads), "-tb", str(options.threads),
            "-b", "512", "-ub", "512", "--offline", "--no-ui",
        ]  # fmt: skip
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._updates = queue.Queue()
        give_up = time.monotonic() + START_S
        while not self._is_up():
            if self._server.poll() is not None or time.monotonic() > give_up:
                raise SystemExit("llama-server did not start: " + " ".join(command))
            time.sleep(0.1)

    def start(self, index, request):
        threading.Thread(target=self._generate, args=(index, request), daemon=True).start()

    def poll(self):
        updates = [self._updates.get(timeout=600)]
        while not self._updates.empty():
            updates.append(self._updates.get())
        return updates

    def close(self):
        self._server.terminate()
        self._server.wait(20)

    def _is_up(self):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def _generate(self, index, request):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        body = {
            "prompt": request["prompt_token_ids"],
            "n_predict": request["max_tokens"],
            "ignore_eos": True,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": True,
            "stream": True,
            "return_tokens": True,
        }
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        sent = 0
        for line in connection.getresponse():
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            # The last event carries no tokens of its own.
            count = event["tokens_predicted"] - sent if event.get("stop") else len(event.get("tokens") or ())
            sent += count
            self._updates.put((index, count, bool(event.get("stop"))))


if __name__ == "__main__":
    peers = []

    def make(options):
        peers.append(Peer(options))
        return peers[0]

    try:
        main(make, lambda: {"llama.cpp": os.environ.get("LLAMA_VERSION", "")})
    finally:
        for peer in peers:
            peer.close()
