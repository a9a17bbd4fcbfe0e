"""The fault simulator: whole generations on a virtual clock, with every kind of fault between services.

    python -m tests.simulation --schedules 100000   random schedules of faults; 1 when a property does not hold
    python -m tests.simulation --seed 7 --trace     one of them again, message by message
    python -m tests.simulation --bugs 1000          the planted bugs, and how soon each is found

Real: `Session`, tree and growth, `Generation` (the coordinator's loop), `Fleet` with its pools and peers, `decide`,
`Drafter` and its cells, `Verifier` and its step delay, `ItemHandler`, and the `Engine` with its scheduler, step runner
and `KVCache`, stepped by hand where production has a thread. Simulated: time and event loop (clock.py), the links
(network.py), processes that die and freeze (replica.py), the members that discovery finds (world.py), clients that
resume (client.py), and the models: tables over the last two tokens in pure Python, which read their context out of the
simulated cache (model.py). Nothing here knows gRPC, threads or tensors.

A seed draws a scenario (scenario.py: rule, texts, policy, speeds, sizes; one to three targets, of two numerics
profiles, and one to three drafts, of two models) and a plan of faults (faults.py), and decides
everything else too, so a schedule is its seed. Links do worse than gRPC does: single items are doubled, held back and
overtaken, because the fences must tolerate it. Four limits, which the protocol need not tolerate: an item is never
carried past the Close of its session; an Open is doubled at once or not at all, since a replica that dropped a session
has no record of it; the parts of a prompt's log-probabilities keep their order; nothing is lost without its connection,
except results of a target that owes them.

Checks after every event (world.py, watched.py, moves.py, ledger.py):

- `Session.check`, `ReceivedTree.check`, `KVCache.check_integrity`; a cache holds exactly the evaluated path.
- Text. GREEDY and COUPLED: the tokens of plain decoding without a draft, at the session and at the client, over every
  move and resume; with other numerics those of the target that answered, and the client was told before.
  REJECTION: the tokens that the round's content and the seed must give, computed independently; a round has one
  content, and one answer of equal numerics, however often it is requested; no draw is used twice.
- Prompts. A quarter of all texts have the log-probabilities of each prompt token, once and in order, from the rows that
  the cache holds, before the first output token.
- Offers. A round offers exactly the path that arrived first and agrees with the committed tokens, up to the plan; each
  token is the proposal drawn after its path, with its draft distribution, a guess from known text, or that of the
  target's head for its position after the row of the newest commit. Every node the draft evaluates has its
  proposal sent, whatever was drawn, unless a commit overtook it; node names are used once; no node lies further past
  the newest commit than the widest window.
- Fences. An answer of another incarnation or round changes nothing; no item is carried out for another incarnation or
  builds on tokens that were never sent.
- Liveness. A text ends within 30 virtual seconds after the last fault has healed; a lost draft is not waited for, a
  connected one is used, a wait ends with its tokens or at its time, not before.
- Moves. A text is open on one target and one draft at a time, the one that it left was closed or is lost, and its
  answers change nothing. A text goes on within 0.3 s where a target is free, with equal numerics if there is one; it is
  not opened where it was just refused. Suspects are at a target one by one. It ends with an error only after three
  losses in a row, its wait without a target, a refusal before its first token, or a failure of the only target.
- Statistics. Rounds and changes of target and draft are what happened; a policy learns every round that did not move.
- The end. No session, block, feed, listener or generation is left on any replica, no replica that is no member is kept,
  and no draft fault failed a request.
"""
