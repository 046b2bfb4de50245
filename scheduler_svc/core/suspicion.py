"""Which request kills workers: counted, tried alone, and only then condemned.

A request that makes a kernel crash would take one worker after the other with it, since what a lost worker ran goes on
elsewhere. So a step that a worker dies of is *fatal* for everybody who took part in it. Who took part in two becomes a
*suspect* and is placed on trial: it runs in steps that hold nothing else, one at a time. Surviving its prompt and a
decode alone clears it. A death in such a step may still be a coincidence, in a fleet that loses workers by the minute;
two of them on end are not, and only then is the request rejected.

Workers also die of other things. Who has got on by `PROVEN_BY` tokens since its last fatal step has been computed again
up to where it was, and a little further; it starts over, so that a rough day alone makes few suspects.
"""

from scheduler_svc.core.request import Request

FATAL_STEPS = 2
"""Fatal steps that make a suspect."""
FATAL_ALONE = 2
"""Deaths of nothing else, one after the other, that condemn."""
PROVEN_BY = 4
"""Tokens after a fatal step that show that it was not this request's doing."""
PROBATION = 2
"""Tokens to generate alone: the first is sampled from the prompt, the second by a decode."""
CONDEMNED = (
    "workers died each time they computed this request, the last two times with nothing else in the step;"
    " it is not tried again"
)


def took_part(request: Request, *, alone: bool) -> bool:
    """The request, which has left its row with every delivered token, was in a step that its worker died of; returns
    whether it is condemned."""
    if request.num_generated - request.fatal_at >= PROVEN_BY:
        request.fatal_steps = request.fatal_alone = 0
    request.fatal_steps += 1
    request.fatal_alone += alone
    request.fatal_at = request.num_generated
    request.suspect = request.fatal_steps >= FATAL_STEPS
    return request.fatal_alone >= FATAL_ALONE


def acquit(request: Request) -> None:
    """The request has survived alone."""
    request.suspect = False
    request.fatal_steps = request.fatal_alone = 0
