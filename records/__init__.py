"""Programs that read the flight record of a scheduler, which `scheduler_svc.recorder` writes.

values      what a record holds, as values; decoding: from the messages of record.proto to these values
reader      reads the files of a record; rows: which rows compute in which step
replay      runs the scheduler core over a record
timeline, lane: a record as a Perfetto trace; perfetto: writes such a trace
explain     explains why requests were slow
whatif      serves the requests in a record again, in a simulation with other settings
rules       checks plans and responses against the rules of the plan protocol
answer      the process that answers an operator's question; commands: the commands of `quire` that use this package
"""
