"""The journal: what lets resumable requests outlive the scheduler and all front ends. Off by default.

The core says which requests are worth keeping and when they are not any longer (`LogBegun`, `LogEnded`, `LogDropped`);
the service hands these effects and the tokens to the journal, which appends them to a file before anything of the turn
goes out to front ends. So a client never has a token that the journal has not. After a loss the next scheduler reads it
and gives the core what `Resume` needs: nothing is computed before its client comes back for it, as with any request
whose client has gone.

* `book`: what a sequence of batches says is known. The writer and the reader use the same code, which is why the
  reader ends up with what the writer knew.
* `segments`: batches as frames in files; where a file stops making sense.
* `syncer`: files to the disk, in a thread of its own.
* `recovery`: what a journal says when nobody writes it any more.
* `journal`: all of it together: what is written when, and what may go.
"""
