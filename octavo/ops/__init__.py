"""Operations on tensors: one file each, holding the contract and its plain-torch reference; see ``dispatch``."""
