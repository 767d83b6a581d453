"""Coatcheck: large tool results stay out of an agent's context, and every byte can be had back exactly."""

from coatcheck import errors
from coatcheck._open import default, open
from coatcheck.errors import CoatcheckError
from coatcheck.ids import is_pointer
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.store import Store
from coatcheck.values import approx_byte_size

__version__ = "0.1.0"
__all__ = ["CoatcheckError", "Ref", "Session", "Store", "approx_byte_size", "default", "errors", "is_pointer", "open"]
