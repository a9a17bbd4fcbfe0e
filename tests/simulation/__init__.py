"""The fault simulator: whole generations on a virtual clock, with everything that can go wrong between services.

    python -m tests.simulation --schedules 100000   random schedules of faults; 1 when a property does not hold
    python -m tests.simulation --seed 7 --trace     one of them again, message by message
    python -m tests.simulation --bugs 1000          the planted bugs, and how soon each is found

Real: `Session`, tree and growth, `Generation` (the coordinator's loop), `decide`, `Drafter` and its cells, `Verifier`
and its gathering, `ItemHandler`, and the `Engine` with its scheduler, step runner and `KVCache`, which is driven step
by step where production has a thread. Simulated: time (clock.py), the links (network.py), processes that die and freeze
(replica.py), clients that resume (client.py), and the models: tables over the last two tokens in pure Python, which
read their context out of the simulated cache (model.py). Nothing here knows asyncio, gRPC, threads or tensors.

A seed draws a scenario (scenario.py: rule, texts, policy, speeds, sizes) and a plan of faults (faults.py), and decides
everything else too, so a schedule is its seed. Links do worse than gRPC does: single items are doubled, held back and
overtaken, because the fences promise to stand it. Three limits, none of which the protocol promises to stand: an item
is never carried past the Close of its session; an Open is doubled at once or not at all, since a replica that dropped a
session knows of it no more; nothing is lost without its connection.

What is checked, after every event (world.py, watched.py, ledger.py):

- `Session.check`, `DraftTree.check`, `KVCache.check_integrity`; what a cache holds is the path that is evaluated.
- Text. GREEDY and COUPLED: the tokens of plain decoding without a draft, at the session and at the client, over every
  resume. REJECTION: the tokens that the round's content and the seed must give, computed independently; a round has one
  content and one answer, whoever asks it again; no draw is used twice.
- Offers. A round offers exactly the path that arrived first and agrees with the committed tokens, up to the plan; each
  token is the proposal drawn at its place, with the row it was drawn from. Every place the draft evaluates has its
  proposal sent, whatever was drawn, unless a commit overtook it; node names are used once; no node lies further past
  the newest commit than the widest window.
- Fences. An answer of another incarnation or round changes nothing; no item is carried out for another incarnation or
  builds on tokens that were never sent.
- Liveness. A text ends within 30 virtual seconds after the last fault has healed; a lost draft is not waited for, one
  that is there is used, a wait ends when its tokens are there or its time is over, not before.
- The end. No session, block, feed, listener or generation is left anywhere, and no draft fault failed a request.
"""
