"""32 chat prompts, from a few words to a few hundred, and an output length for each."""

from __future__ import annotations

import random
from typing import Any

STORY = (
    "The lighthouse keeper had counted ships for thirty years. Every evening she wrote their names in a green book, "
    "and every morning she read the list aloud to the gulls. One night no ship came. She waited until the oil ran "
    "low, then climbed down the rocks with a lantern and found a small boat tied to the pier, empty but for a letter "
    "addressed to her. The letter said only: thank you for the light, we could not stay. She wrote its words in the "
    "book as if they were a name, and lit the lamp again. "
)
NOTES = (
    "Meeting notes: the pump in hall two was replaced on Monday and ran warm on Tuesday. Anna measured 71 degrees at "
    "the bearing. The supplier asks for photographs before sending a technician. Boris will take them on Thursday. "
    "Until then the pump runs at half speed, which costs about forty crates a day. The customer in Graz was told. "
    "The next meeting is on Friday at nine; the new safety sheets have to be signed before that. "
)
CODE = (
    "def total(prices, rate):\n    result = 0\n    for price in prices:\n        result += price * (1 + rate)\n"
    "    return round(result, 2)\n"
)

QUICK = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue to a child.",
    "Give me three ideas for a rainy afternoon.",
    "What is the difference between a list and a tuple in Python?",
    "How do I boil an egg so that the yolk stays soft?",
    "Who wrote Romeo and Juliet, and what is it about?",
    "Name five animals that live in the desert.",
]

CHATS = [
    *QUICK,
    f"Summarise this story in one sentence.\n\n{STORY}",
    f"What does the letter say? Answer in a few words.\n\n{STORY}",
    f"Continue this story.\n\n{STORY}",
    f"Invent a title for each of the two texts.\n\n{STORY}\n\n{NOTES}",
    f"List the tasks in these notes with the person responsible.\n\n{NOTES}",
    f"Write a polite e-mail to the supplier based on these notes.\n\n{NOTES}",
    f"How warm was the bearing, and who measured it?\n\n{NOTES}",
    f"Compare the two texts: which one is a report, and how do you know?\n\n{NOTES}\n\n{STORY}\n\n{NOTES}",
    f"Explain what this function does.\n\n{CODE}",
    f"Add type annotations to this function.\n\n{CODE}",
    f"Write two tests for this function.\n\n{CODE}",
    f"What happens if the list is empty?\n\n{CODE}",
    "Hi!",
    "Tell me a joke.",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Describe the water cycle.",
    "Write a product description for a wooden chair that folds flat.",
    "Give me a recipe for pancakes for two people, step by step.",
    "What should I pack for a weekend in the mountains in autumn?",
    "Explain photosynthesis in three sentences.",
    "Why do cats purr?",
    "Write a birthday greeting for a colleague who likes gardening and old maps.",
    "What are the advantages and disadvantages of working from home?",
]


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text as the user's turn of a chat, or as plain text where there is no chat template."""
    if not tokenizer.chat_template:
        return [tokenizer(text)["input_ids"] for text in texts]
    turns = [[{"role": "user", "content": text}] for text in texts]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def ragged_lengths(count: int, low: int = 16, high: int = 128, seed: int = 0) -> list[int]:
    """`count` output lengths in tokens, spread evenly over `[low, high]` in random order."""
    lengths = [low + (high - low) * i // max(1, count - 1) for i in range(count)]
    random.Random(seed).shuffle(lengths)
    return lengths
