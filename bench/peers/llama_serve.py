"""llama.cpp's own HTTP server, by the package `xllamacpp`: run by the Python of its environment, without specdec.

Usage: llama_serve.py SETTINGS, a JSON object: model, threads, slots, positions, speculation (a member of llama.cpp's
list, or ""), draft, n_max. Prints its address as a line of JSON, and ends with its standard input.
"""

import json
import sys

import xllamacpp

asked = json.loads(sys.argv[1])
parameters = xllamacpp.CommonParams()
parameters.model.path = asked["model"]
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = asked["threads"]
parameters.n_parallel = asked["slots"]
parameters.n_ctx = asked["positions"] * asked["slots"]
parameters.port = 0
parameters.warmup = True
parameters.cache_ram_mib = 0  # prompts do not come again
if asked["speculation"]:
    kind = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{asked['speculation']}")
    speculative = parameters.speculative
    speculative.types = [kind]
    speculative.draft.n_max = asked["n_max"]
    if asked["draft"]:
        speculative.draft.mparams.path = asked["draft"]
        speculative.draft.cpuparams.n_threads = speculative.draft.cpuparams_batch.n_threads = asked["threads"]
    own = {"NGRAM_SIMPLE": speculative.ngram_simple, "NGRAM_MAP_K": speculative.ngram_map_k}.get(asked["speculation"])
    if own is not None:
        own.size_m = asked["n_max"]
server = xllamacpp.Server(parameters)
print(json.dumps({"address": server.listening_address}), flush=True)
sys.stdin.read()
