"""Writes questions to train a chat draft on: forms of six classes, each with every subject of its class, shuffled.

None of them is one of `chat_prompts.jsonl`, which measure the draft: those have other subjects.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path

FACT_FORMS = (
    "What is {}?", "What is {} and why does it matter?", "Who discovered {}?", "Tell me three facts about {}.",
    "Where does {} come from?", "When did people first learn about {}?", "Why is {} important?", "How does {} work?",
    "What are the main parts of {}?", "Is it true that {} is rare?", "What do scientists know about {}?",
)  # fmt: skip
FACTS = (
    "gravity", "the Amazon river", "a volcano", "the Roman Empire", "electricity", "the human heart", "penicillin",
    "the Great Wall of China", "a black hole", "the water cycle", "coffee", "the telephone", "DNA", "an earthquake",
    "the French Revolution", "iron", "a rainbow", "the brain", "the moon", "chocolate", "the printing press", "salt",
    "oxygen", "the Sahara desert", "a comet", "glass", "the immune system", "paper", "a coral reef", "the alphabet",
    "lightning", "the Olympic Games", "gold", "a glacier", "silk", "the compass", "magnetism", "the steam engine",
    "a tornado", "an atom", "democracy", "the liver", "a fossil", "the Renaissance", "rubber", "sound", "the piano",
)  # fmt: skip
EXPLAIN_FORMS = (
    "Explain {} in simple words.", "Explain {} to a child.", "How would you explain {} to a beginner?",
    "What is the idea behind {}?", "Explain step by step how {} works.", "Why do we need {}?",
    "What is the difference between {} and {other}?", "Give an example of {}.", "What are the limits of {}?",
    "What problem does {} solve?",
)  # fmt: skip
EXPLANATIONS = (
    "a microwave oven", "recycling", "insurance", "a bank loan", "the stock market", "an electric motor", "evolution",
    "a search engine", "solar energy", "a battery", "taxes", "encryption", "a touch screen", "digestion", "a budget",
    "supply and demand", "a lever", "machine learning", "a telescope", "an operating system", "a credit card", "GPS",
    "a heat pump", "fermentation", "a database", "elections", "a nuclear power plant", "memory", "a lens", "friction",
    "a spreadsheet", "the greenhouse effect", "a pension", "statistics", "a submarine", "blood pressure", "an engine",
)  # fmt: skip
WRITING_FORMS = (
    "Write a short story about {}.", "Write a poem about {}.", "Describe {}.", "Write a letter about {}.",
    "Write a short email about {}.", "Write the first paragraph of a novel about {}.", "Write a slogan for {}.",
    "Write a dialogue between two friends about {}.", "Write a diary entry about {}.", "Write a blog post about {}.",
    "Write a thank-you note for {}.", "Write a speech about {}.",
)  # fmt: skip
WRITINGS = (
    "a stormy night at sea", "an old lighthouse", "a robot who wants to paint", "a garden in spring", "a broken watch",
    "a long train journey", "a small bakery", "the first day of school", "a cat that can talk", "a lost letter",
    "a trip to the moon", "a mountain village", "a dragon that is afraid of fire", "a rainy afternoon", "a new bicycle",
    "a farewell party", "a wise grandmother", "an empty house", "a summer by the lake", "a delayed delivery",
    "a king without a crown", "a missing key", "a busy market", "a quiet forest", "a wedding", "a football match",
    "a clumsy magician", "a secret door", "a picnic", "a hospital visit", "an island", "a music festival", "a river",
)  # fmt: skip
ADVICE_FORMS = (
    "How can I {}?", "Give me three tips to {}.", "What is the best way to {}?", "I want to {}. Where do I start?",
    "What should I avoid when I {}?", "How long does it take to {}?", "Make a plan for a week to {}.",
    "What do I need to {}?", "Is it a good idea to {}?", "Suggest five ways to {}.",
)  # fmt: skip
ADVICE = (
    "cook a healthy breakfast", "train a puppy", "write a good essay", "clean a kitchen", "grow tomatoes",
    "plan a birthday party", "lose weight", "read more books", "make new friends in a city", "repair a flat tire",
    "choose a laptop", "prepare for an exam", "reduce stress at work", "paint a room", "learn to swim", "play guitar",
    "write a business plan", "move to another country", "drink more water", "start a blog", "buy a used car",
    "organise a small office", "speak in public", "make good coffee", "save electricity at home", "visit Japan",
    "stop a cold", "teach a child to read", "build a bookshelf", "manage my time", "stay warm in winter", "bake bread",
    "find a new flat", "ask for a higher salary", "get up early", "keep a houseplant alive", "meditate", "draw faces",
)  # fmt: skip
CODE_FORMS = (
    "Write a Python function that {}.", "How do I write a program that {}?", "Write JavaScript code that {}.",
    "Show me a short example in Python that {}.", "Write a function that {} and explain it.",
    "Write a test for a function that {}.", "What is wrong with a function that {} and never ends?",
)  # fmt: skip
CODE = (
    "adds two numbers", "reverses a string", "sorts a list of names", "counts the words of a text", "finds duplicates",
    "prints the first ten square numbers", "computes the average of a list", "reads a CSV file", "downloads a web page",
    "converts Celsius to Fahrenheit", "checks whether a year is a leap year", "removes spaces from a string",
    "computes a factorial", "finds the smallest of three numbers", "prints a multiplication table", "merges two lists",
    "draws a random number", "counts vowels", "checks a password", "writes a log file", "groups words by length",
    "sums the digits of a number", "checks whether a number is prime", "parses a date", "copies a dictionary",
)  # fmt: skip
REWRITING_FORMS = (
    "Make this sentence shorter: {}", "Rewrite this politely: {}", "Correct the mistakes: {}", "Summarize: {}",
    "Translate into French: {}", "Write this in the past tense: {}", "Make this more friendly: {}", "Continue: {}",
    "Turn this into a headline: {}", "Say this with other words: {}", "Turn this into three bullet points: {}",
    "What is the main idea of this text? {}",
)  # fmt: skip
REWRITINGS = (
    "I can not come to the party because I has to work late tonight.",
    "The shop on the corner sells bread, milk, cheese and fresh fruit every day of the week.",
    "Send me the report now, I have been waiting for hours.",
    "Our team has worked hard this year, and the results are better than we expected.",
    "She dont know where her brother have put the keys of the car.",
    "The new bridge opened yesterday after three years of construction, and thousands of people walked across it.",
    "It is what it is and there is nothing that anybody could possibly do about it anymore.",
    "The museum is closed on Mondays, but visitors can buy tickets for other days at the entrance.",
    "You forgot my order again and nobody answers the phone.",
    "Cats sleep up to sixteen hours a day because hunting takes much energy.",
    "Please be informed that the elevator is out of service until further notice.",
    "The river rose quickly after the storm, so the village had to move its animals to higher ground.",
    "We was happy that the train finally arrive.",
    "Drinking enough water helps the body to control its temperature and keeps the skin healthy.",
    "I think that maybe we should perhaps start a little bit earlier next time.",
    "The library will lend laptops to students who do not have one at home.",
    "My phone is broke and the seller dont want to give me the money back.",
    "Farmers in the region grow wheat and corn, while the hills are used for wine.",
)  # fmt: skip
CLASSES = {
    "facts": (FACT_FORMS, FACTS),
    "explain": (EXPLAIN_FORMS, EXPLANATIONS),
    "writing": (WRITING_FORMS, WRITINGS),
    "advice": (ADVICE_FORMS, ADVICE),
    "code": (CODE_FORMS, CODE),
    "rewriting": (REWRITING_FORMS, REWRITINGS),
}


def questions(seed: int) -> list[tuple[str, str]]:
    """Returns all questions, each with its class, one class after the other in turn, each class shuffled."""
    draws = random.Random(seed)
    shuffled = []
    for name, (forms, subjects) in CLASSES.items():
        own = [(name, form.format(subject, other=draws.choice(subjects))) for form in forms for subject in subjects]
        draws.shuffle(own)
        shuffled.append(own)
    return [one for turn in itertools.zip_longest(*shuffled) for one in turn if one is not None]


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help=".jsonl file")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    found = questions(asked.seed)
    asked.out.write_text("".join(json.dumps({"class": name, "prompt": one}) + "\n" for name, one in found))
    print(f"{asked.out}: {len(found)} questions")


if __name__ == "__main__":
    main()
