"""A serving loop with the pool: a tiny transformer with paged KV. `--alone` serves without it; the tokens are the same."""

import sys

import torch

import umbp

TOKENS, PAGES, LAYERS, HEADS, WIDTH, WORDS = 16, 64, 4, 4, 64, 512
torch.set_default_dtype(torch.float64)  # a batch of another shape rounds otherwise; here that is far too little to change a token
torch.manual_seed(0)  # stands for a checkpoint: the same weights in every process
embed, place, head = torch.randn(WORDS, WIDTH), torch.randn(PAGES * TOKENS, WIDTH), torch.randn(WIDTH, WORDS)
weights = torch.randn(LAYERS, 4, WIDTH, WIDTH) / WIDTH**0.5
kv = {name: [torch.zeros(PAGES * TOKENS, WIDTH) for _ in range(LAYERS)] for name in ("key", "value")}  # a row is a token's slot


def forward(ids, start, rows, load=None):
    """Logits after the last of ``ids``: computes ``ids[start:]`` and keeps their KV in their rows; that before is there, or loads."""
    at = torch.arange(len(ids))
    x, rows, seen = embed[ids[start:]] + place[at[start:]], rows[: len(ids)], at <= at[start:, None]
    for layer, (q, k, v, o) in enumerate(weights):
        if load:
            load.wait(layer)  # later layers may still be on their way
        keys, values = kv["key"][layer], kv["value"][layer]
        keys[rows[start:]], values[rows[start:]] = x @ k, x @ v
        heads = [each.view(-1, HEADS, WIDTH // HEADS).transpose(0, 1) for each in (x @ q, keys[rows], values[rows])]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen)
        x = torch.nn.functional.layer_norm(x + out.transpose(0, 1).reshape(-1, WIDTH) @ o, (WIDTH,))
    return x[-1] @ head


def serve(prompt, count, loader):
    """The prompt continued by ``count`` tokens, and how many of its pages came from the pool."""
    ids, slots = list(prompt), torch.randperm(PAGES)  # an allocator's choice: pages in any order
    rows = (slots[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
    keys = umbp.page_keys(ids[:-1], page_tokens=TOKENS)  # the last token is always computed: its logits are the answer
    found = loader.lookup(keys) if loader else 0
    load = loader.load(keys[:found], slots[:found]) if found else None
    logits = forward(ids, found * TOKENS, rows, load)
    missing = load.finish().missing if load else []
    if len(missing):  # evicted between lookup and load, or the pool died: from there on, once more
        logits = forward(ids, int(missing[0]) * TOKENS, rows)
    for _ in range(count):
        ids.append(int(logits.argmax()))
        logits = forward(ids, len(ids) - 1, rows)
    if loader:
        keys = umbp.page_keys(ids, page_tokens=TOKENS)
        loader.offload(keys, slots[: len(keys)]).result()  # what is stored already is not even read
    return ids, found - len(missing)


if __name__ == "__main__":
    loader = None
    if "--alone" not in sys.argv:
        layout = umbp.Layout.of(kv, page_tokens=TOKENS)
        loader = umbp.Loader(umbp.connect().namespace(model="tiny", revision="seed 0", page_tokens=TOKENS, layout=layout), kv)
    prompt = torch.randint(WORDS, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    torch.seed()  # slots differ from process to process
    ids, pages = serve(prompt, 100, loader)
    print("pages from the pool:", pages)
    print("tokens:", *ids[len(prompt) :])
