"""Programs that measure Quire. The server's wheel includes `load` and its commands; the rest is for developers.

load        `quire bench serve` and `quire bench sweep`: load on a running service
offline     `quire bench offline`: fixed requests to a service that it starts
claims      the claims of the articles on batching, checked: docs/strategies.md
strategies  `quire bench strategies`: static, dynamic and continuous batching
policies    `quire bench policies`: scheduling policies in virtual time
scheduler, frontend, kernels, cpu, gpu: one part alone
studies     comparisons for the documentation, in virtual time in plots
testbed     services, tiny checkpoints and environments to measure, check and test with
peers       Quire and other servers in turn
commands    the commands of the command line
spread      the distribution of measured values
results, notes: measurements, as files and as text
"""
