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
    "Describe {} in two sentences.", "How big is {}?", "What is the history of {}?",
    "What would the world be like without {}?", "Give a short definition of {}.",
    "What are common mistakes people make about {}?", "Which countries are known for {}?",
    "How has {} changed over time?", "What is {} made of?",
)  # fmt: skip
FACTS = (
    "gravity", "the Amazon river", "a volcano", "the Roman Empire", "electricity", "the human heart", "penicillin",
    "the Great Wall of China", "a black hole", "the water cycle", "coffee", "the telephone", "DNA", "an earthquake",
    "the French Revolution", "iron", "a rainbow", "the brain", "the moon", "chocolate", "the printing press", "salt",
    "oxygen", "the Sahara desert", "a comet", "glass", "the immune system", "paper", "a coral reef", "the alphabet",
    "lightning", "the Olympic Games", "gold", "a glacier", "silk", "the compass", "magnetism", "the steam engine",
    "a tornado", "an atom", "democracy", "the liver", "a fossil", "the Renaissance", "rubber", "sound", "the piano",
    "the Nile", "a desert", "the European Union", "a satellite", "the Mona Lisa", "aspirin", "the Berlin Wall",
    "the solar system", "rice", "the bicycle", "bacteria", "a tsunami", "the Industrial Revolution", "copper",
    "a cloud", "the nervous system", "the sun", "sugar", "the radio", "carbon dioxide", "the Pacific Ocean",
    "a whale", "cement", "the kidney", "a vitamin", "the Silk Road", "the violin", "a penguin", "the United Nations",
    "a mushroom", "the North Pole", "an elephant", "cotton", "the camera", "Shakespeare", "Mozart", "Albert Einstein",
    "ancient Egypt", "a spider", "the stomach",
)  # fmt: skip
EXPLAIN_FORMS = (
    "Explain {} in simple words.", "Explain {} to a child.", "How would you explain {} to a beginner?",
    "What is the idea behind {}?", "Explain step by step how {} works.", "Why do we need {}?",
    "What is the difference between {} and {other}?", "Give an example of {}.", "What are the limits of {}?",
    "What problem does {} solve?",
    "Why is {} useful?", "What happens inside {}?", "Describe how {} is used in daily life.",
    "What are the advantages and disadvantages of {}?", "Compare {} with {other}.",
    "What should everybody know about {}?", "How did people live before {}?", "Explain {} with a comparison.",
)  # fmt: skip
EXPLANATIONS = (
    "a microwave oven", "recycling", "insurance", "a bank loan", "the stock market", "an electric motor", "evolution",
    "a search engine", "solar energy", "a battery", "taxes", "encryption", "a touch screen", "digestion", "a budget",
    "supply and demand", "a lever", "machine learning", "a telescope", "an operating system", "a credit card", "GPS",
    "a heat pump", "fermentation", "a database", "elections", "a nuclear power plant", "memory", "a lens", "friction",
    "a spreadsheet", "the greenhouse effect", "a pension", "statistics", "a submarine", "blood pressure", "an engine",
    "a washing machine", "inflation", "a mortgage", "a vaccine passport", "a thermometer", "gravity on the moon",
    "an algorithm", "wind energy", "a fuse", "a contract", "a firewall", "a keyboard", "breathing", "a tax return",
    "a monopoly", "a pulley", "a neural network", "a microscope", "a web browser", "a barcode", "a compass",
    "an air conditioner", "composting", "cloud storage", "a parliament", "a dam", "learning", "a mirror", "inertia",
    "a calendar", "acid rain", "compound interest", "probability", "a helicopter", "cholesterol", "a gear",
    "a blockchain", "a laser", "a hybrid car", "an antibiotic",
)  # fmt: skip
WRITING_FORMS = (
    "Write a short story about {}.", "Write a poem about {}.", "Describe {}.", "Write a letter about {}.",
    "Write a short email about {}.", "Write the first paragraph of a novel about {}.", "Write a slogan for {}.",
    "Write a dialogue between two friends about {}.", "Write a diary entry about {}.", "Write a blog post about {}.",
    "Write a thank-you note for {}.", "Write a speech about {}.",
    "Write a haiku about {}.", "Write a review of {}.", "Write a news report about {}.",
    "Write the ending of a story about {}.", "Write a song about {}.", "Invent a title for a book about {}.",
    "Write a postcard about {}.", "Describe the sounds and smells of {}.", "Write a funny story about {}.",
)  # fmt: skip
WRITINGS = (
    "a stormy night at sea", "an old lighthouse", "a robot who wants to paint", "a garden in spring", "a broken watch",
    "a long train journey", "a small bakery", "the first day of school", "a cat that can talk", "a lost letter",
    "a trip to the moon", "a mountain village", "a dragon that is afraid of fire", "a rainy afternoon", "a new bicycle",
    "a farewell party", "a wise grandmother", "an empty house", "a summer by the lake", "a delayed delivery",
    "a king without a crown", "a missing key", "a busy market", "a quiet forest", "a wedding", "a football match",
    "a clumsy magician", "a secret door", "a picnic", "a hospital visit", "an island", "a music festival", "a river",
    "a haunted castle", "a talking tree", "a pilot in a storm", "an unexpected guest", "a painter in Paris",
    "a winter walk", "the last day of summer", "a stolen painting", "a shy giant", "a bus driver", "a lazy dragon",
    "the city at night", "a forgotten song", "a school play", "a tiny spaceship", "a chess champion", "a fisherman",
    "a desert journey", "a new neighbour's garden", "a family reunion", "an old photograph", "a pirate ship",
    "a hungry bear", "the smell of fresh bread", "a clock that runs backwards", "a hidden treasure",
    "a street musician", "a dream about flying", "a traveling circus", "a thunderstorm", "a retired teacher",
    "a snowman",
)  # fmt: skip
ADVICE_FORMS = (
    "How can I {}?", "Give me three tips to {}.", "What is the best way to {}?", "I want to {}. Where do I start?",
    "What should I avoid when I {}?", "How long does it take to {}?", "Make a plan for a week to {}.",
    "What do I need to {}?", "Is it a good idea to {}?", "Suggest five ways to {}.",
    "Why is it so hard to {}?", "I tried to {} and failed. What can I do?",
    "What are common mistakes when people {}?", "Explain how to {} step by step.", "How much money do I need to {}?",
    "My friend wants to {}. What should I tell her?", "Write a checklist for someone who wants to {}.",
    "What tools help me to {}?", "Can I {} without help?",
)  # fmt: skip
ADVICE = (
    "cook a healthy breakfast", "train a puppy", "write a good essay", "clean a kitchen", "grow tomatoes",
    "plan a birthday party", "lose weight", "read more books", "make new friends in a city", "repair a flat tire",
    "choose a laptop", "prepare for an exam", "reduce stress at work", "paint a room", "learn to swim", "play guitar",
    "write a business plan", "move to another country", "drink more water", "start a blog", "buy a used car",
    "organise a small office", "speak in public", "make good coffee", "save electricity at home", "visit Japan",
    "stop a cold", "teach a child to read", "build a bookshelf", "manage my time", "stay warm in winter", "bake bread",
    "find a new flat", "ask for a higher salary", "get up early", "keep a houseplant alive", "meditate", "draw faces",
    "learn to dance", "run a marathon", "write a novel", "remove a stain", "plant a tree", "organize a wedding",
    "stop smoking", "remember names", "live alone", "fix a leaking tap", "choose a camera", "pass a driving test",
    "relax after work", "decorate a small room", "ride a horse", "play chess", "open a restaurant", "study abroad",
    "eat less sugar", "make a podcast", "sell an old car", "work from home", "give a toast", "make fresh pasta",
    "recycle at home", "travel through Italy", "treat a headache", "help a child with homework", "build a birdhouse",
    "keep a diary", "cool a house in summer", "cook soup", "rent a flat", "change my career", "wake up rested",
    "water a garden", "learn to sing", "take better photos", "raise chickens", "write a resume",
)  # fmt: skip
CODE_FORMS = (
    "Write a Python function that {}.", "How do I write a program that {}?", "Write JavaScript code that {}.",
    "Show me a short example in Python that {}.", "Write a function that {} and explain it.",
    "Write a test for a function that {}.", "What is wrong with a function that {} and never ends?",
    "Write a Java method that {}.", "Write a Python class that {}.", "Write a shell command that {}.",
    "Explain in words how a program {}.", "Write pseudocode that {}.", "Write a Python one-liner that {}.",
    "Give me a C function that {}.",
)  # fmt: skip
CODE = (
    "adds two numbers", "reverses a string", "sorts a list of names", "counts the words of a text", "finds duplicates",
    "prints the first ten square numbers", "computes the average of a list", "reads a CSV file", "downloads a web page",
    "converts Celsius to Fahrenheit", "checks whether a year is a leap year", "removes spaces from a string",
    "computes a factorial", "finds the smallest of three numbers", "prints a multiplication table", "merges two lists",
    "draws a random number", "counts vowels", "checks a password", "writes a log file", "groups words by length",
    "sums the digits of a number", "checks whether a number is prime", "parses a date", "copies a dictionary",
    "finds the longest word", "multiplies two matrices", "rotates a list", "validates an email address",
    "counts lines in a file", "prints the Fibonacci numbers", "computes the median of a list", "writes a JSON file",
    "sends an email", "converts miles to kilometers", "prints today's date", "splits a string at commas",
    "computes a power", "finds the second smallest number", "prints a triangle of stars",
    "removes an item from a list", "shuffles a list", "capitalizes every word", "generates a password",
    "measures time", "sorts a dictionary by value", "finds common elements of two lists",
    "checks whether a number is even", "formats a phone number", "swaps two variables", "searches a sorted list",
    "stores data in a dictionary", "asks the user for a name",
)  # fmt: skip
REWRITING_FORMS = (
    "Make this sentence shorter: {}", "Rewrite this politely: {}", "Correct the mistakes: {}", "Summarize: {}",
    "Translate into French: {}", "Write this in the past tense: {}", "Make this more friendly: {}", "Continue: {}",
    "Turn this into a headline: {}", "Say this with other words: {}", "Turn this into three bullet points: {}",
    "What is the main idea of this text? {}",
    "Rewrite this for a child: {}", "Make this sentence longer: {}", "Write a reply to this message: {}",
    "Explain what this means: {}", "Translate into Spanish: {}", "List the key words: {}",
    "Write this in the future tense: {}", "Give this text a title: {}", "Is this sentence correct? {}",
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
    "The bakery opens at six, but the best bread is sold before eight.",
    "Me and him was going to the cinema yesterday.",
    "Close the window immediately, it is freezing in here.",
    "The company will open a second office next spring to be closer to its customers.",
    "He have never saw such a big dog in his life.",
    "Due to the fact that it was raining, we made the decision to stay at home.",
    "The concert was cancelled because the singer lost her voice.",
    "You never listen to me when I talk about my problems.",
    "Trees clean the air, give shade in summer and are a home for many birds.",
    "The meeting starts at ten and everybody should bring a notebook.",
    "There is many reasons why people moves to the city.",
    "The old theater was sold last month and will become a hotel with eighty rooms.",
    "I am writing to complain about the broken lamp that I received on Tuesday.",
    "Children who read every day learn new words faster than others.",
    "Walking thirty minutes a day keeps the heart strong and improves the mood.",
    "Their going to there house to get they're car.",
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
