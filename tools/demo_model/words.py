"""Corpus vocabulary: names, towns, fact values, and story subjects.

Names and towns are combined from syllables, so the lists are large (about 1,700 names) and an answer cannot be guessed.
A held-out name consists of familiar syllables in an order that never occurs in training.
"""

from tools.demo_model.split import is_held_out


def _listed(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


_NAME_ONSETS = _listed(
    "Al Ber Bran Cal Cor Dal Del Dor El Fal Fen Gar Gil Hal Har Ish Jor Kal Kel Lan Lor Mar Mel Mir Nal "
    "Nor Ol Pel Per Quin Ral Ros Sal Sel Tal Tam Tor Ul Val Ver Wil Yor Zan"
)
_NAME_ENDINGS = _listed(
    "a an as ba bert da dan den din do dric en ena eth ia ick ida in ina is ka la lan len lia lin lo ma "
    "man men mer mo na nia o on ric sa ton vin"
)
_TOWN_ONSETS = _listed(
    "Ash Birch Black Bright Clear Cold Copper Deep East Elm Fair Fern Green Grey High Long Moss North "
    "Oak Old Red Silver South Stone Swan West White Wind Winter Wood"
)
_TOWN_ENDINGS = _listed(
    "bridge brook dale field ford gate ham haven hill land mill mouth port ridge side stead ton vale well wick"
)

NAMES = tuple(onset + ending for onset in _NAME_ONSETS for ending in _NAME_ENDINGS)
TRAINING_NAMES = tuple(name for name in NAMES if not is_held_out("name", name))
HELD_OUT_NAMES = tuple(name for name in NAMES if is_held_out("name", name))
TOWNS = tuple(onset + ending for onset in _TOWN_ONSETS for ending in _TOWN_ENDINGS)

NOUNS = _listed(
    "acorn anchor apple arrow basket beacon bell blanket bottle branch brick bridge broom brush bucket "
    "button cabin candle carpet castle cherry chest clock cloud coat coin comet compass copper coral "
    "cradle crown curtain daisy desert diamond door dragon drum eagle engine feather fence fiddle flag "
    "flame flute forest fountain garden garlic ginger glass glove gold hammer harbour harp hat hazel "
    "helmet honey hook horn island ivory jacket jewel juniper kettle key kite ladder lake lamp lantern "
    "leaf lemon letter lily magnet maple marble meadow melon mirror mitten moon mountain needle nest "
    "ocean olive onion orange orchid oven paddle painting pearl pebble pencil pepper piano pillow plum "
    "pocket pumpkin puzzle rabbit rainbow raven ribbon ring river robin rocket rope rose saddle sail "
    "salmon sapphire scarf shell shield ship silver sparrow spoon star stone summer sword table teapot "
    "temple thistle thunder tiger timber torch tower train trumpet tulip tunnel turtle umbrella valley "
    "velvet village violin wagon walnut water whistle willow window winter wolf yarn"
)
ADJECTIVES = _listed(
    "amber ancient blue bright broken brown carved clever crimson curved dusty empty frozen gentle "
    "golden green grey heavy hidden hollow humble little lonely lucky narrow painted pale patient plain "
    "proud purple quiet red round rusty shiny silent silver simple small smooth soft square steady "
    "striped sturdy tiny white wooden yellow"
)

KINDS = _listed(
    "badger bear beaver bird boy cat cow crow deer dog donkey dragon duck fox frog giant girl goat goose "
    "hare hedgehog hen horse king lion mole monkey mouse otter owl pig pony princess queen rabbit robin "
    "sheep snail squirrel tiger turtle wolf"
)
WOMEN = frozenset(("girl", "princess", "queen", "hen", "cow"))
MEN = frozenset(("boy", "king", "giant"))
TRAITS = _listed(
    "brave careful cheerful clever curious friendly gentle happy honest kind lazy little lonely merry "
    "patient proud quiet shy tiny young"
)
PLACES = _listed(
    "by the sea;near a wide river;in a green valley;at the edge of the forest;in a small village;"
    "on a high hill;beside a quiet lake;in an old barn;under a tall oak tree;in a sunny meadow;"
    "behind the old mill;near the harbour",
    ";",
)
TREASURES = _listed(
    "red kite;silver bell;wooden boat;blue ball;golden ring;old lantern;green scarf;little drum;"
    "shiny key;paper hat;small flute;round mirror;warm blanket;yellow umbrella;brass compass;music box",
    ";",
)
SPOTS = _listed(
    "under a bush;behind a big stone;in the tall grass;beside the well;inside a hollow log;"
    "under the bridge;on a low branch;behind the garden gate;next to the path;in an empty basket",
    ";",
)
FOODS = _listed("apples bread berries carrots cheese cherries honey nuts pears plums soup cake")
SKILLS = _listed(
    "swim;climb;whistle;dance;sing;paint;skate;juggle;bake bread;play the drum;read;fly a kite",
    ";",
)
BUILDS = _listed("boat bridge cart house hut raft swing sledge table tower")

CITIES = _listed(
    "Amsterdam;Ankara;Athens;Bangkok;Barcelona;Beijing;Berlin;Bogota;Boston;Brussels;Budapest;Buenos Aires;Cairo;"
    "Cape Town;Chicago;Copenhagen;Dallas;Delhi;Denver;Dubai;Dublin;Edinburgh;Florence;Geneva;Hamburg;Hanoi;Helsinki;"
    "Hong Kong;Houston;Istanbul;Jakarta;Kyiv;Lagos;Lima;Lisbon;London;Los Angeles;Lyon;Madrid;Melbourne;Mexico City;"
    "Miami;Milan;Montreal;Moscow;Mumbai;Munich;Nairobi;Naples;New York;Osaka;Oslo;Paris;Phoenix;Porto;Prague;Rome;"
    "San Diego;San Francisco;Santiago;Seattle;Seoul;Shanghai;Singapore;Stockholm;Sydney;Tallinn;Tokyo;Toronto;Turin;"
    "Utrecht;Vancouver;Venice;Vienna;Vilnius;Warsaw;Washington;Zagreb;Zurich;sf;nyc;tokyo;paris;london;berlin",
    ";",
)
COUNTRIES = _listed(
    "Argentina Australia Austria Belgium Brazil Canada Chile China Colombia Croatia Denmark Egypt England Estonia "
    "Finland France Germany Ghana Greece Hungary Iceland India Indonesia Ireland Israel Italy Japan Kenya Latvia "
    "Malta Mexico Morocco Nepal Norway Peru Poland Portugal Romania Scotland Serbia Spain Sweden Thailand Turkey "
    "Uganda Ukraine Vietnam"
)
STATES = _listed("CA NY TX WA UK USA FR DE MA IL")
LANGUAGES = _listed("Arabic Dutch English Finnish French German Greek Italian Japanese Korean Polish Spanish Turkish")
WEATHERS = _listed("sunny cloudy rainy windy snowy foggy stormy clear hot cold warm mild dry wet freezing")
TOPICS = _listed(
    "address;age;altitude;area;author;balance;bedtime;birthday;boiling point;budget;calories;capital;city;climate;"
    "closing time;colour;condition;contact;cost;currency;date;deadline;definition;delivery date;density;depth;diet;"
    "director;discount;duration;email;exchange rate;fact;favourite colour;favourite food;forecast;gate;genre;grade;"
    "hair colour;headline;height;hobby;humidity;income;inventory;job;joke;language;latitude;length;location;longitude;"
    "mass;mayor;meaning;melting point;menu;message;mood;moon phase;motto;name;news;nickname;note;occupation;"
    "opening hours;order status;origin;owner;password;phone number;player name;plot;population;position;postcode;"
    "president;price;priority;profile;quantity;quote;rank;rating;recipe;release date;review;river;role;room;salary;"
    "schedule;score;seat;shipping cost;shoe size;size;speed;stage;status;stock;stock price;summary;sunrise;sunset;"
    "symbol;synonym;tax;team;temperature;tide;time zone;title;total;traffic;translation;value;version;volume;wage;"
    "weight;wind speed;winner;year;zip code",
    ";",
)


def with_article(noun: str) -> str:
    """Return `noun` after the right indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
