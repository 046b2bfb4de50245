"""Programs that verify Quire with faults. They are for developers and not in any wheel.

driver      makes plans by hand for one engine of a worker
sim         runs the scheduler core in simulated worlds with faults, and checks its promises
planted     bugs of the core that the simulator must find
mutation    small changes of the core that some check must find
chaos       kills, freezes, attacks and overloads running services
oracle      the tokens that transformers gives
commands    the commands of the command line
"""
