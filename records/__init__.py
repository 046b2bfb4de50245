"""Programs that read the flight record of a scheduler, which `scheduler_svc.recorder` writes.

values      what a record holds, as values; decoding: from the messages of record.proto to these values
reader      reads the files of a record; rows: which rows compute in which step
replay      runs the core over a record
timeline, lane: a record as a trace of Perfetto; perfetto: the writer of such a trace
explain     explains why requests were slow
whatif      serves the requests of a record again in a simulation with other settings
rules       checks plans and answers against the rules of the plan protocol
answer      the process that answers an operator's question; commands: the commands of the command line
"""
