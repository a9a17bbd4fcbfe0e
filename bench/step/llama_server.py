"""llama.cpp's own HTTP server, by the package `xllamacpp`: run by the Python of its environment, without specdec.

Usage: llama_server.py MODEL.gguf THREADS POSITIONS. Prints its address and what it uses of the
processor, one line of JSON, and ends with its standard input.
"""

import json
import sys

import xllamacpp

parameters = xllamacpp.CommonParams()
parameters.model.path = sys.argv[1]
parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = int(sys.argv[2])
parameters.n_ctx = int(sys.argv[3])
parameters.n_parallel = 1
parameters.port = 0
parameters.warmup = True
parameters.cache_ram_mib = 0  # prompts do not come again
server = xllamacpp.Server(parameters)
print(json.dumps({"address": server.listening_address, "system": xllamacpp.get_system_info()}), flush=True)
sys.stdin.read()
