/// What the caller asserts beside the file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParseOptions {
    /// Take PEFT's own defaults (r 8, alpha 8, rsLoRA off) where a key is absent, instead of refusing.
    pub assume_peft_defaults: bool,
    /// The served base is the changed base that an unconverted PiSSA, OLoRA, CorDA, LoRA-GA or LoftQ adapter is relative
    /// to.
    pub assume_base: bool,
}
